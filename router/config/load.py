"""YAML → checked `Config`: the one place that reads configuration. Every problem of a file is reported at once."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from router.config.checks import check_worker, cross_check
from router.config.reader import Reader
from router.config.schema import Config, DiscoveryConfig, WorkerConfig
from router.errors import ConfigError

MAX_FILE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says; each beats the file. `workers`, when given, replaces the file's list."""

    workers: tuple[str, ...] = ()
    host: str | None = None
    port: int | None = None
    admin_port: int | None = None
    processes: int | None = None


def load_config(
    path: Path | None, overrides: Overrides | None = None, *, env: Mapping[str, str] | None = None
) -> Config:
    """Reads `path` (None: defaults only). Relative paths in the file are relative to the file's folder.

    Raises ConfigError whose text has one line per problem: dotted key, what was given, what is allowed.
    """
    document = {} if path is None else read_yaml(path)
    folder = Path.cwd() if path is None else path.absolute().parent
    return build_config(document, overrides or Overrides(), os.environ if env is None else env, folder)


def build_config(document: object, overrides: Overrides, env: Mapping[str, str], folder: Path) -> Config:
    """`load_config` after the YAML: `document` is the decoded file (None for an empty one)."""
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration must be a mapping of keys, not a {type(document).__name__}")
    document = _overridden(document, overrides)
    reader = Reader(env=env, folder=folder)
    config = reader.section(Config, document)
    problems = reader.problems
    if config is not None:
        config = _with_static_workers(config)
        problems = [*problems, *cross_check(config, document)]
    if problems or config is None:
        raise ConfigError("\n".join(problems))
    return config


def parse_worker(entry: object) -> WorkerConfig:
    """One worker as `POST /workers` gives it: like an entry of `workers`, but secrets only as plain text.

    A caller of the admin API must not be able to have this machine's files or environment sent to a URL of its choice.
    Raises ConfigError.
    """
    reader = Reader(env=None, folder=Path())
    worker = reader.section(WorkerConfig, entry)
    problems = reader.problems or ([] if worker is None else check_worker(worker))
    if problems or worker is None:
        raise ConfigError("\n".join(problems))
    return worker


def _overridden(document: dict[object, object], overrides: Overrides) -> dict[object, object]:
    """A copy of the file's mapping with the command line's values in place, so that they pass the same checks."""
    result = dict(document)
    for section, key, value in (
        ("listen", "host", overrides.host),
        ("listen", "port", overrides.port),
        ("admin", "port", overrides.admin_port),
    ):
        current = result.get(section)
        if value is not None and (current is None or isinstance(current, dict)):
            result[section] = {**(current or {}), key: value}
    if overrides.processes is not None:
        result["processes"] = overrides.processes
    if overrides.workers:
        result["workers"] = [{"url": url} for url in overrides.workers]
        discovery = result.get("discovery")
        if isinstance(discovery, dict):
            result["discovery"] = {key: value for key, value in discovery.items() if key != "static"}
    return result


def _with_static_workers(config: Config) -> Config:
    """`discovery.static` is another place for `workers`; from here on there is one list."""
    if not config.discovery.static:
        return config
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    discovery = DiscoveryConfig(dns=config.discovery.dns, kubernetes=config.discovery.kubernetes)
    fields.update(workers=config.workers + config.discovery.static, discovery=discovery)
    return Config(**fields)


class _Loader(yaml.SafeLoader):
    """YAML's safe subset; a key given twice in one mapping is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> object:
    """The decoded file. Raises ConfigError with line and column for what is no YAML."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: over {MAX_FILE_BYTES} bytes; is this a configuration file?")
    try:
        return yaml.load(data, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError(f"{path}: {place}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML's constructors let these out, for instance for the date 2026-13-45 or "!!int x".
        raise ConfigError(f"{path}: a value cannot be read: {error}") from None
