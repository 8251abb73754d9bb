"""The command line. Each command's module is imported only when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from router import __version__, build
from router.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (2 for what the person who typed it can mend)."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        print(f"kv-router: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kv-router", description="KV-cache-aware request router for SGLang and vLLM")
    parser.add_argument("--version", action="version", version=f"kv-router {__version__} ({build.kind()})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _serve(commands)
    _demo(commands)
    _engine(commands)
    _doctor(commands)
    _bench(commands)
    return parser


def _serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="run the router in front of a fleet")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; config.example.yaml explains every key")
    parser.add_argument("--worker", action="append", default=[], metavar="URL", help="an engine; may be repeated")
    parser.add_argument("--host", help="public listener's address (listen.host)")
    parser.add_argument("--port", type=int, help="public listener's port (listen.port)")
    parser.add_argument("--admin-port", type=int, help="admin listener's port (admin.port)")
    parser.add_argument("--processes", type=int, metavar="N", help="serving processes on the same port")
    parser.add_argument("--as-process", action="store_true", help=argparse.SUPPRESS)  # started by a supervisor

    def run(arguments: argparse.Namespace) -> int:
        from router.config import Overrides
        from router.serve import serve

        overrides = Overrides(
            workers=tuple(arguments.worker),
            host=arguments.host,
            port=arguments.port,
            admin_port=arguments.admin_port,
            processes=arguments.processes,
        )
        return serve(arguments.config, overrides, as_process=arguments.as_process)

    parser.set_defaults(run=run)


def _demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="KV-aware routing against round-robin on simulated engines, no GPU")
    parser.add_argument("--duration", type=float, default=12.0, metavar="S", help="seconds of load for each policy")
    parser.add_argument("--engines", type=int, default=4, metavar="N")
    parser.add_argument(
        "--disaggregated", action="store_true", help="2 prefill engines of 2 ranks and 3 decode engines instead"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the workload's schedule")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as JSON")
    parser.add_argument(
        "--hold", action="store_true", help="then keep the load running for the live page, until Ctrl-C"
    )

    def run(arguments: argparse.Namespace) -> int:
        from router.demo.run import demo

        return demo(
            duration_s=arguments.duration,
            engines=arguments.engines,
            seed=arguments.seed,
            json_path=arguments.json,
            hold=arguments.hold,
            disaggregated=arguments.disaggregated,
        )

    parser.set_defaults(run=run)


def _engine(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from router.engine.options import add_engine_arguments

    parser = commands.add_parser("engine", help="one simulated SGLang engine: real HTTP, real KV events, no model")
    add_engine_arguments(parser)

    def run(arguments: argparse.Namespace) -> int:
        from router.engine.options import options_from
        from router.engine.run import run_engine

        return run_engine(options_from(arguments))

    parser.set_defaults(run=run)


def _doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="check live engines against the contract, and say what mends them")
    parser.add_argument("urls", nargs="*", metavar="URL", help="an engine's HTTP address")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration: keys, vLLM's kv_events")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="how long to listen")
    parser.add_argument("--probe", action="store_true", help="send a few small prompts to every rank")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")

    def run(arguments: argparse.Namespace) -> int:
        from router.doctor.command import doctor

        return doctor(
            arguments.urls,
            config=arguments.config,
            seconds=arguments.seconds,
            probe=arguments.probe,
            as_json_text=arguments.json,
        )

    parser.set_defaults(run=run)


def _bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure the router's own parts")
    parts = parser.add_subparsers(required=True, metavar="PART")
    index = parts.add_parser("index", help="event ingest, prefix lookup, memory per block")
    index.add_argument("--blocks", type=int, default=1_000_000, metavar="N")
    index.add_argument("--ranks", type=int, default=64, metavar="N")
    index.add_argument("--json", type=Path, metavar="FILE")

    def run(arguments: argparse.Namespace) -> int:
        from rich.console import Console

        from router.bench import index as bench

        try:
            result = bench.run(arguments.blocks, arguments.ranks)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        bench.print_table(result, Console())
        _write_json(arguments.json, result)
        return 0

    index.set_defaults(run=run)
    _bench_prompt(parts)
    _bench_serve(parts)
    _bench_decision(parts)
    _bench_replay(parts)
    _bench_calibrate(parts)


def _bench_serve(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser("serve", help="CPU time of the router for a request, over real sockets")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of load for each kind of request")
    parser.add_argument("--json", type=Path, metavar="FILE")

    def run(arguments: argparse.Namespace) -> int:
        from rich.console import Console

        from router.bench import serve as bench

        try:
            result = bench.run(arguments.seconds)
        except bench.BenchFailure as error:
            raise ConfigError(str(error)) from None
        bench.print_table(result, Console())
        _write_json(arguments.json, result)
        return 0

    parser.set_defaults(run=run)


def _bench_decision(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser("decision", help="index look-up and policy over 64 and 1,000 ranks")
    parser.add_argument("--json", type=Path, metavar="FILE")

    def run(arguments: argparse.Namespace) -> int:
        from rich.console import Console

        from router.bench import decision as bench

        result = bench.run()
        bench.print_table(result, Console())
        _write_json(arguments.json, result)
        return 0

    parser.set_defaults(run=run)


def _bench_replay(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from router.bench.replay_options import add_replay_arguments

    parser = parts.add_parser("replay", help="a trace through the real index and policies, in virtual time")
    add_replay_arguments(parser)

    def run(arguments: argparse.Namespace) -> int:
        from router.bench.replay_cli import replay

        return replay(arguments)

    parser.set_defaults(run=run)


def _bench_calibrate(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser("calibrate", help="fit the simulated engine's timing to a real, otherwise idle engine")
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the profile, for bench replay --profile")

    def run(arguments: argparse.Namespace) -> int:
        from router.bench import calibrate

        profile = calibrate.run(arguments.url, seed=arguments.seed, told=print)
        print(profile, end="")
        if arguments.json is not None:
            arguments.json.write_text(profile, encoding="utf-8")
        return 0

    parser.set_defaults(run=run)


def _bench_prompt(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    prompt = parts.add_parser("prompt", help="from a request's text to its decision: cold, and the next turn")
    prompt.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer.json and chat template")
    prompt.add_argument("--json", type=Path, metavar="FILE")

    def run(arguments: argparse.Namespace) -> int:
        from rich.console import Console

        from router.bench import prompt as bench
        from router.prompt.tokenizer import TokenizerUnusable

        try:
            result = bench.run(arguments.tokenizer)
        except (ValueError, TokenizerUnusable) as error:
            raise ConfigError(str(error)) from None
        bench.print_table(result, Console())
        _write_json(arguments.json, result)
        return 0

    prompt.set_defaults(run=run)


def _write_json(path: Path | None, document: object) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
