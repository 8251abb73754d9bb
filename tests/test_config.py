from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from router.config import (
    Config,
    DnsConfig,
    KubernetesConfig,
    KvEventsConfig,
    Overrides,
    RankConfig,
    Secret,
    WorkerConfig,
    build_config,
    load_config,
    parse_worker,
)
from router.config.schema import Section
from router.contract.url import WorkerUrl
from router.errors import ConfigError

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"


def built(document: object, *, env: dict[str, str] | None = None, folder: Path = Path("/"), **flags: Any) -> Config:
    return build_config(document, Overrides(**flags), env or {}, folder)


def problems(document: object, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        built(document, **more)
    return str(refused.value).split("\n")


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "router.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def yaml_problem(folder: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(written(folder, text))
    return str(refused.value)


def every_key(kind: type[Section]) -> set[str]:
    keys = set()
    for field in msgspec.structs.fields(kind):
        keys.add(field.name)
        for option in (field.type, *get_args(field.type)):
            if isinstance(option, type) and issubclass(option, Section):
                keys |= every_key(option)
    return keys


def test_the_example_file_is_the_defaults() -> None:
    assert load_config(EXAMPLE, env={}) == Config() == load_config(None, env={})


def test_the_example_file_names_every_key_there_is() -> None:
    text = EXAMPLE.read_text()
    missing = {key for key in every_key(Config) if f"{key}:" not in text}
    assert missing == set()


def test_the_commented_workers_of_the_example_are_valid() -> None:
    lines = EXAMPLE.read_text().split("\n")
    start = lines.index("workers: []")
    entries = [line[1:] for line in lines[start + 1 :][: lines[start:].index("") - 1]]
    workers = built(yaml.safe_load("\n".join(["workers:", *entries]))).workers
    assert [worker.url.text for worker in workers] == ["http://engine-0:30000", "http://vllm-0:8000"]
    assert workers[1].kv_events is not None
    assert workers[1].kv_events.block_size == 32


def test_an_unknown_key_is_an_error_with_a_suggestion() -> None:
    assert problems({"worker_api_keys": "x"}) == ["worker_api_keys: unknown key; did you mean worker_api_key?"]
    assert problems({"listen": {"prot": 1}}) == ["listen.prot: unknown key; did you mean listen.port?"]
    assert problems({"port": 1}) == ["port: unknown key; did you mean listen.port?"]
    assert "known here: url, api_key, model" in problems({"workers": [{"url": "http://w", "zzz": 1}]})[0]
    assert problems({7: 1})[0].startswith("7: unknown key")


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"listen": {"port": 99999}}, "listen.port: 99999 is not allowed; expected an integer from 0 to 65535"),
        ({"listen": {"port": "80"}}, "listen.port: '80' is not allowed; expected an integer from 0 to 65535"),
        ({"listen": {"port": True}}, "listen.port: True is not allowed; expected an integer from 0 to 65535"),
        ({"listen": {"metrics": 1}}, "listen.metrics: 1 is not allowed; expected true or false"),
        ({"listen": 5}, "listen: 5 is not allowed; expected a mapping of keys"),
        ({"listen": {"tls": {"cert": "/"}}}, "listen.tls.key: missing"),
        ({"timeouts": {"idle_s": 0}}, "timeouts.idle_s: 0 is not allowed; expected a number above 0, at most 86400"),
        (
            {"policy": {"u_weight": float("nan")}},
            "policy.u_weight: nan is not allowed; expected a number from 0 to 100",
        ),
        ({"policy": {"u_weight": 10**400}}, "policy.u_weight: 1"),
        ({"policy": {"name": "best"}}, "policy.name: 'best' is not allowed; expected one of kv, "),
        ({"admin": {"host": ""}}, "admin.host: '' is not allowed; expected text"),
        ({"admin": {"host": "a\nb"}}, "admin.host: 'a\\nb' is not allowed; expected text"),
        ({"log": {"level": None}}, "log.level: null is not allowed; expected one of debug, "),
        ({"workers": {"url": "http://w"}}, "workers: {'url': 'http://w'} is not allowed; expected a list"),
        ({"workers": ["http://w"]}, "workers[0]: 'http://w' is not allowed; expected a mapping of {url: http"),
        ({"workers": [{"model": "m"}]}, "workers[0].url: missing"),
        ({"workers": [{"url": "w:1"}]}, "workers[0].url: worker URL 'w:1' has no scheme; write http://w:1"),
        ({"workers": [{"url": "http://w", "role": "both"}]}, "workers[0].role: 'both' is not allowed; expected one of"),
        ({"tokenizer": {"path": "/no/such"}}, "tokenizer.path: /no/such does not exist or cannot be read"),
        ({"tokenizer": {"path": "a\0b"}}, "tokenizer.path: 'a\\x00b' is not allowed; expected the path"),
        ([], "the configuration must be a mapping of keys, not a list"),
    ],
)
def test_a_bad_value_is_named_with_what_was_given_and_what_is_allowed(document: object, problem: str) -> None:
    (line,) = problems(document)
    assert line.startswith(problem)


def test_every_problem_is_reported_at_once() -> None:
    found = problems({"listen": {"port": -1}, "logs": {}, "workers": [{"url": "http://w", "model": 5}]})
    assert [line.split(":")[0] for line in found] == ["listen.port", "logs", "workers[0].model"]


@pytest.mark.parametrize(
    ("discovery", "said"),
    [
        ({"dns": {}}, ["discovery.dns.names: missing"]),
        ({"dns": {"names": []}}, ["discovery.dns.names: give at least one, each once"]),
        ({"dns": {"names": ["a"], "ports": [1, 1]}}, ["discovery.dns.ports: give at least one, each once"]),
        ({"dns": {"names": ["a b"]}}, ["discovery.dns.names[0]: host 'a b' is neither a DNS name nor an IP address"]),
        ({"kubernetes": {}}, ["discovery.kubernetes.selector: missing"]),
        (
            {"kubernetes": {"selector": "a=b", "ports": ["Http"]}},
            [
                "discovery.kubernetes.ports[0]: 'Http' is not allowed; expected an integer from 1 to 65535 or text of "
                "at most 15 characters (in quotes if it looks like a number) without control characters"
            ],
        ),
        (
            {"kubernetes": {"selector": "a=b", "kv_events": {"host": "h"}}},
            ["discovery.kubernetes.kv_events.host: names one machine, and this is for many; use the ports"],
        ),
    ],
)
def test_discovery_that_could_find_nothing_is_refused(discovery: dict[str, Any], said: list[str]) -> None:
    assert problems({"discovery": discovery}) == said


def test_the_commented_discovery_of_the_example_is_valid() -> None:
    lines = EXAMPLE.read_text().split("\n")
    start = lines.index(next(line for line in lines if line.startswith("discovery:")))
    text = "\n".join(lines[start + 1 : lines.index("", start)])
    text = text.replace("  #  ", "    ").replace("dns: null", "dns:").replace("kubernetes: null", "kubernetes:")
    discovery = built({"discovery": yaml.safe_load(text)}).discovery
    assert discovery.dns == DnsConfig(names=("engines.default.svc.cluster.local",))
    assert discovery.kubernetes == KubernetesConfig(selector="app=sglang")


def test_static_discovery_is_more_workers() -> None:
    config = built({"workers": [{"url": "http://a"}], "discovery": {"static": [{"url": "http://b"}]}})
    assert [worker.url.text for worker in config.workers] == ["http://a:80", "http://b:80"]
    assert config.discovery.static == ()
    both = built({"discovery": {"static": [{"url": "http://b"}], "dns": {"names": ["a"]}}})
    assert both.discovery.dns == DnsConfig(names=("a",))


def test_one_engine_listed_twice_is_refused_after_normalisation() -> None:
    """Case 87."""
    document = {"workers": [{"url": "http://w:80"}, {"url": "HTTP://W/"}]}
    assert problems(document) == ["workers[1].url: http://w:80 is workers[0] already; list each engine once"]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"policy": {"name": "random", "u_weight": 1}}, "policy.u_weight: has no effect with policy.name random"),
        ({"tokenizer": {"mode": "engine", "path": "/"}}, "tokenizer.path: has no effect with tokenizer.mode engine"),
        ({"tokenizer": {"mode": "off", "cache_mb": 5}}, "tokenizer.cache_mb: has no effect with tokenizer.mode off"),
        ({"tokenizer": {"mode": "local", "log_text": True}}, "tokenizer.log_text: has no effect with"),
        (
            {"tokenizer": {"verify_every": 0, "forward_ids": True}},
            "tokenizer.forward_ids: has no effect with tokenizer.verify_every 0: nothing is compared",
        ),
        ({"tokenizer": {"verify_every": 0, "log_text": True}}, "tokenizer.log_text: has no effect with"),
        ({"index": {"max_blocks": 2048, "max_blocks_per_rank": 4096}}, "index.max_blocks_per_rank: 4096 has no effect"),
    ],
)
def test_a_setting_without_effect_is_an_error(document: object, problem: str) -> None:
    assert problems(document)[0].startswith(problem)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ({"host": "*"}, "host: host '*' is neither"),
        ({"host": "169.254.169.254"}, "host: host '169.254.169.254' is a link-local"),
        ({"endpoints": ["ipc:///x"]}, "endpoints[0].events: 'ipc:///x' is not of the form tcp://host:port"),
        ({"endpoints": [{"events": "tcp://a:1", "load": "tcp://a:0"}]}, "endpoints[0].load: 'tcp://a:0': the port"),
        ({"endpoints": ["tcp://a:1"], "endpoint_port_base": 1}, "endpoint_port_base: has no effect beside endpoints"),
        ({"endpoints": ["tcp://a:1"], "dp_size": 2}, "dp_size: 2 is not the number of endpoints, 1"),
        ({"endpoint_port_base": 65535, "dp_size": 2}, "endpoint_port_base: the last of 2 ranks would be on port 65536"),
        ({"block_size": 0}, "block_size: 0 is not allowed; expected an integer from 1 to 65536"),
        ({"blocksize": 16}, "blocksize: unknown key; did you mean workers[0].kv_events.block_size?"),
    ],
)
def test_kv_events_settings_are_checked(events: object, problem: str) -> None:
    """Cases 16 and 102."""
    (line,) = problems({"workers": [{"url": "http://w", "kv_events": events}]})
    assert line.startswith(f"workers[0].kv_events.{problem}")


def test_rank_endpoints_may_be_text_or_a_mapping() -> None:
    events = {"endpoints": ["tcp://a:1", {"events": "tcp://b:1", "replay": "tcp://b:2"}], "block_size": 16}
    (worker,) = built({"workers": [{"url": "http://w", "kv_events": events}]}).workers
    assert worker.kv_events == KvEventsConfig(
        endpoints=(RankConfig(events="tcp://a:1"), RankConfig(events="tcp://b:1", replay="tcp://b:2")), block_size=16
    )


def test_listeners_cannot_share_a_port() -> None:
    assert problems({}, port=8081)[0].startswith("admin.port: 8081 is the public listener's port as well")
    assert built({"listen": {"host": "127.0.0.2"}}, port=8081).listen.port == 8081
    assert built({"admin": {"port": 0}}, port=0).listen.port == 0


def test_an_open_admin_listener_is_allowed_and_warned_about() -> None:
    """Case 101."""
    assert "admin.key is not set" in built({"admin": {"host": "0.0.0.0"}}).warnings()[0]
    assert built({"admin": {"host": "0.0.0.0", "key": "k"}}).warnings() == ()
    assert Config().warnings() == ()


def test_the_command_line_beats_the_file() -> None:
    document = {"listen": {"port": 1, "max_body_mb": 5}, "workers": [{"url": "http://a"}], "discovery": {"static": []}}
    config = built(document, workers=("http://b:1/", "http://c"), host="::1", port=2, admin_port=3)
    assert (config.listen.host, config.listen.port, config.listen.max_body_mb) == ("::1", 2, 5)
    assert config.admin.port == 3
    assert [worker.url.text for worker in config.workers] == ["http://b:1", "http://c:80"]
    assert problems({}, workers=("http://b", "b:1"))[0].startswith("workers[1].url")
    assert problems({"listen": 5}, port=2)[0].startswith("listen: 5 is not allowed")


def test_secrets_come_as_text_file_or_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    document = {
        "worker_api_key": {"env": "ENGINE_KEY"},
        "api_keys": ["plain", {"file": "key"}, {"file": str(tmp_path / "key")}],
        "workers": [{"url": "http://w", "api_key": {"env": "ENGINE_KEY"}}],
    }
    config = built(document, env={"ENGINE_KEY": "from-env"}, folder=tmp_path)
    assert config.worker_api_key == Secret("from-env") == config.workers[0].api_key
    assert [key.reveal() for key in config.api_keys] == ["plain", "from-file", "from-file"]
    assert config.api_keys[0].matches(b"plain")
    assert not config.api_keys[0].matches("plaïn".encode())


@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        ({"env": "NOT_SET"}, "environment variable NOT_SET is not set"),
        ({"env": "HOSTILE"}, "environment variable HOSTILE: a secret is 1 to 8192 printable ASCII"),
        ({"file": "absent"}, "absent cannot be read: No such file"),
        ({"file": "."}, "cannot be read: Is a directory"),
        ({"file": "a", "env": "b"}, "{file: PATH} or {env: NAME}"),
        ({"vault": "x"}, "{file: PATH} or {env: NAME}"),
        (12345678, "quoted text"),
        ("", "1 to 8192 printable ASCII"),
        ("hunter2\r\nx: y", "without spaces"),
    ],
)
def test_an_unusable_secret_is_refused_without_being_repeated(secret: object, problem: str, tmp_path: Path) -> None:
    """Case 103."""
    (line,) = problems({"admin": {"key": secret}}, env={"HOSTILE": "hunter2\n"}, folder=tmp_path)
    assert line.startswith("admin.key: ")
    assert problem in line
    assert "hunter2" not in line
    assert "12345678" not in line


def test_secrets_are_never_printed(caplog: pytest.LogCaptureFixture) -> None:
    """Case 103."""
    worker = {"url": "http://w", "api_key": "hunter2"}
    config = built(
        {"worker_api_key": "hunter2", "api_keys": ["hunter2"], "admin": {"key": "hunter2"}, "workers": [worker]}
    )
    logging.getLogger("test").warning("%s %r", config, config.worker_api_key)
    shown = f"{config} {config!r} {config.api_keys} {config.masked()} {caplog.text} {vars(Secret)}"
    assert "hunter2" not in shown
    assert config.worker_api_key is not None
    with pytest.raises(TypeError):
        pickle.dumps(config.worker_api_key)
    assert Config().masked()["worker_api_key"] is None
    masked: Any = msgspec.json.decode(msgspec.json.encode(config.masked()))
    assert masked["workers"][0]["url"] == "http://w:80"
    assert masked["workers"][0]["api_key"] == masked["worker_api_key"] == masked["api_keys"][0] == "********"


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "key.pem").write_text("")
    text = "tokenizer: {path: tok}\nlisten: {tls: {cert: key.pem, key: key.pem}}\n"
    config = load_config(written(tmp_path, text))
    assert config.tokenizer.path == tmp_path / "tok"
    assert config.listen.tls is not None
    assert config.listen.tls.cert == tmp_path / "key.pem"
    tokenizer = config.masked()["tokenizer"]
    assert isinstance(tokenizer, dict)
    assert (tokenizer["path"], tokenizer["chat_template"], tokenizer["mode"]) == (str(tmp_path / "tok"), None, "auto")


def test_yaml_errors_say_where(tmp_path: Path) -> None:
    assert "line 2, column 14: " in yaml_problem(tmp_path, "listen:\n  port: [1, ]]\n")
    assert "line 3, column 1: the key 'log' is given twice" in yaml_problem(tmp_path, "log: {}\nlisten: {}\nlog: {}\n")
    assert "'port' is given twice" in yaml_problem(tmp_path, 'listen: {port: 1, "port": 2}')
    assert "could not determine a constructor" in yaml_problem(tmp_path, "log: !!python/object:os.system {}")


@pytest.mark.parametrize(
    "text",
    [
        *(b"\xff\xfe\x00", b"a: \x00", "log: 2026-13-45", "log: !!int x", "log: !!timestamp x", "log: !!bool x"),
        *("[" * 5000, "? [a]\n: b", "? {a: b}\n: c", "a: *b", "<<: 5", "a: b: c", "\t", "a: &x [*x]", "- 1", "5"),
        "log: " + "1" * 5000,
    ],
    ids=range(17),
)
def test_what_is_no_configuration_is_a_config_error(tmp_path: Path, text: str | bytes) -> None:
    assert yaml_problem(tmp_path, text)


def test_an_absent_or_huge_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")
    assert "over 4194304 bytes" in yaml_problem(tmp_path, b"#" * 5_000_000)


def test_empty_files_and_empty_sections_mean_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing\n")) == Config()
    assert load_config(written(tmp_path, "listen:\nworkers:\napi_keys:\npolicy:\n")) == Config()


def test_a_bare_off_is_the_mode_and_not_false(tmp_path: Path) -> None:
    """YAML 1.1 reads off as false."""
    assert load_config(written(tmp_path, "tokenizer: {mode: off}\n")).tokenizer.mode == "off"


def test_a_key_in_the_wrong_place_of_a_worker_is_pointed_to_its_place() -> None:
    with pytest.raises(ConfigError, match=r"^block_size: unknown key; did you mean kv_events\.block_size\?$"):
        parse_worker({"url": "http://w", "block_size": 16})


def test_a_worker_of_the_admin_api_is_checked_like_one_of_the_file() -> None:
    assert parse_worker({"url": "http://w", "api_key": "k", "kv_events": {"block_size": 16}}) == WorkerConfig(
        url=WorkerUrl("http", "w", 80), api_key=Secret("k"), kv_events=KvEventsConfig(block_size=16)
    )
    with pytest.raises(ConfigError, match=r"^kv_events\.host: host"):
        parse_worker({"url": "http://w", "kv_events": {"host": "*"}})
    entries: list[object] = [None, [], {}, {"url": 5}]
    for entry in entries:
        with pytest.raises(ConfigError):
            parse_worker(entry)


@pytest.mark.parametrize("reference", [{"file": "/etc/hostname"}, {"env": "PATH"}])
def test_the_admin_api_cannot_reach_files_or_the_environment(reference: object) -> None:
    """Case 102: a worker added by a caller would be sent what the reference names."""
    with pytest.raises(ConfigError, match="api_key: here a secret must be plain text"):
        parse_worker({"url": "http://w", "api_key": reference})


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(every_key(Config))), inner, max_size=3)
    ),
    max_leaves=12,
)
documents = st.dictionaries(
    st.sampled_from([*Config.__struct_fields__, "other"]) | st.text(),
    plain_values
    | st.dictionaries(st.sampled_from(sorted(every_key(Config))), plain_values, max_size=4)
    | st.lists(st.dictionaries(st.sampled_from(sorted(every_key(WorkerConfig))), plain_values), max_size=2),
    max_size=4,
)


@given(plain_values | documents)
def test_any_document_is_a_configuration_or_a_config_error(document: object) -> None:
    try:
        config = build_config(document, Overrides(port=0), {}, Path("/nowhere"))
    except ConfigError:
        return
    msgspec.json.encode(config.masked())


@given(plain_values)
def test_any_worker_entry_is_a_worker_or_a_config_error(entry: object) -> None:
    try:
        worker = parse_worker(entry)
    except ConfigError:
        return
    assert WorkerUrl.parse(worker.url.text) == worker.url


def test_limits_and_the_line_of_those_who_wait() -> None:
    admission = built({"admission": {"max_inflight_per_worker": 8, "wait_s": 2, "priority_header": "x-p"}}).admission
    assert (admission.max_inflight_per_worker, admission.max_waiting, admission.wait_s) == (8, 1024, 2)
    own = built({"workers": [{"url": "http://w", "max_inflight": 3}], "admission": {"max_waiting": 5}})
    assert own.workers[0].max_inflight == 3


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"admission": {"wait_s": 2}}, "admission.wait_s: has no effect without admission.max_inflight_per_worker"),
        ({"admission": {"max_waiting": 2}}, "admission.max_waiting: has no effect without admission.max_inflight_per"),
        (
            {"admission": {"max_inflight_per_worker": 1, "max_waiting": 0, "wait_s": 2}},
            "admission.max_waiting: 0 lets nobody wait, so wait_s and priority_header have no effect",
        ),
        (
            {"admission": {"max_inflight_per_worker": 1, "priority_header": "a b"}},
            "admission.priority_header: 'a b' is not allowed",
        ),
        (
            {"listen": {"max_body_mb": 64, "max_buffered_mb": 63}},
            "listen.max_buffered_mb: 63 refuses a body that max_body_mb allows",
        ),
    ],
)
def test_a_limit_that_contradicts_another_or_limits_nothing_is_an_error(document: object, problem: str) -> None:
    assert problems(document)[0].startswith(problem)


def test_processes_come_from_the_file_or_the_command_line() -> None:
    assert built({"processes": 3}).processes == 3
    assert build_config({"processes": 3}, Overrides(processes=2), {}, Path()).processes == 2
    assert problems({"processes": 0}) == ["processes: 0 is not allowed; expected an integer from 1 to 64"]


SIBLINGS = {"listen": "tcp://0.0.0.0:8082", "peers": ["tcp://router-1:8082"], "key": "k"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"listen": None}, "siblings.listen: missing"),
        ({"listen": "tcp://router-0:8082"}, "siblings.listen: 'tcp://router-0:8082': give the address to listen at"),
        ({"listen": "0.0.0.0:8082"}, "siblings.listen: '0.0.0.0:8082' is not of the form"),
        ({"listen": "tcp://0.0.0.0:0"}, "siblings.listen: 'tcp://0.0.0.0:0' is not of the form"),
        ({"peers": ["tcp://169.254.169.254:1"]}, "siblings.peers[0]: host '169.254.169.254' is a link-local"),
        ({"peers": []}, "siblings: name the other routers, by peers or dns"),
        ({"dns": "not a name"}, "siblings.dns: host 'not a name'"),
        ({"key": None}, "siblings.key: missing"),
    ],
)
def test_siblings_that_could_not_hear_each_other_are_errors(changes: dict[str, Any], says: str) -> None:
    (problem,) = problems({"siblings": {**SIBLINGS, **changes}})
    assert problem.startswith(says)


def test_siblings_need_no_settings_between_processes() -> None:
    assert built({"siblings": SIBLINGS}).siblings.peers == ("tcp://router-1:8082",)
    assert not built({"processes": 2, "siblings": {"snapshots": False}}).siblings.snapshots
    assert problems({"siblings": {"snapshots": False}})[0].startswith("siblings.listen: missing")
