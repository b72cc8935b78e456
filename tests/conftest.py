"""What the core's tests share."""

import contextlib
import importlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import httpx
import openai
import pytest


class ThrowawayDistributions:
    """Real distributions in a folder on ``sys.path``: modules, and the dist-info that registers them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plugin_names: set[str] = set()

    def install(self, name, plugins, modules, version="1.0", *, catalogue=None, folder=None):
        """``plugins`` maps entry-point names to modules, ``modules`` names to source text."""
        folder = folder or self.folder
        information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = {"darkbloom": plugins, "darkbloom.catalogue": catalogue or {}}
        lines = [
            line
            for group, entries in groups.items()
            if entries
            for line in [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        ]
        (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        self.plugin_names |= plugins.keys()
        importlib.invalidate_caches()


@pytest.fixture
def throwaway_distributions(tmp_path, monkeypatch):
    """Install distributions for one test; afterwards neither they nor their modules are left."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield ThrowawayDistributions(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def load_made(throwaway_distributions):
    """Load only the plugins that the test installed, whatever else is there."""
    from darkbloom_core.plugins import PluginOptions, load_plugins

    def load(**options):
        made = throwaway_distributions.plugin_names
        return load_plugins(PluginOptions(**{"allow": frozenset(made), **options}))

    return load


@pytest.fixture
def report_of(throwaway_distributions):
    """The reports of the plugins that the test installed, by name."""

    def report_of(plugins):
        made = throwaway_distributions.plugin_names
        return {report.name: report for report in plugins.report() if report.name in made}

    return report_of


@pytest.fixture
def install(throwaway_distributions):
    """Install a throw-away distribution: its name, its plugins, its modules, its version."""
    return throwaway_distributions.install


@pytest.fixture
def process_environment(tmp_path):
    """The environment of processes that a test starts: nobody's settings or models. A test may add to it."""
    ours = ("DARKBLOOM_", "HF_", "XDG_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    unmeasured = {"DARKBLOOM_ENGINE__CHAIN": "always", "DARKBLOOM_ENGINE__PACK": "never"}  # a quick warm-up
    return {**kept, **unmeasured, "HOME": str(tmp_path / "home"), "COLUMNS": "200"}


@pytest.fixture
def run_python(process_environment, tmp_path):
    """Run this Python with the arguments given, in ``tmp_path``; gives the completed process."""

    def run(*arguments, stdin=""):
        return subprocess.run(
            [sys.executable, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=process_environment,
            cwd=tmp_path,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def run_darkbloom(run_python, process_environment, tmp_path):
    """Run the command line with the arguments given; it must leave with the exit code ``code``.

    It runs in this process, as if in ``tmp_path`` and the environment of processes; in one of
    its own if plugins were made for it.
    """

    def run(*arguments, code=0, stdin=""):
        if "PYTHONPATH" in process_environment:
            done = run_python("-c", "from darkbloom_core.cli import main; main()", *arguments, stdin=stdin)
        else:
            done = run_here(arguments, process_environment, tmp_path, stdin)
        assert done.returncode == code, done.stderr or done.stdout
        return done

    return run


def run_here(arguments, environment, folder, stdin):
    """What ``main`` leaves and writes, logging included, with ``arguments``."""
    from darkbloom_core.cli import main

    out, err, root = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with (
            patch.dict(os.environ, environment, clear=True),
            patch("sys.stdin", io.StringIO(stdin)),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as left,
        ):
            main(list(map(str, arguments)))
    finally:
        root.handlers = handlers
    return subprocess.CompletedProcess(arguments, left.value.code, out.getvalue(), err.getvalue())


@pytest.fixture
def make_plugin(process_environment, tmp_path):
    """Install a plugin for the processes that the test starts: a name, and the source of its module."""
    folder = tmp_path / "processes"
    folder.mkdir()
    process_environment["PYTHONPATH"] = str(folder)
    distributions = ThrowawayDistributions(folder)

    def make(name, source):
        module = f"darkbloom_{name}"
        distributions.install(f"darkbloom-{name}", {name: module}, {module: source})

    return make


@pytest.fixture(scope="session")
def toy_server(tmp_path_factory):
    """A server with toy models: ``toy/plain``, ``toy/slow``, ``toy/small`` (64 tokens), ``toy/broken``."""
    from toy_server import ToyServer

    models = {
        "toy/plain": {},
        "toy/slow": {"seconds": 0.02},
        "toy/small": {"context_tokens": 64},
        "toy/broken": {"breaks_on": 33},
    }
    with ToyServer(
        tmp_path_factory.mktemp("toys"), models, server={"body_bytes_limit": 100_000}
    ).running() as server:
        yield server


class Serving:
    """A running ``darkbloom serve``: where it listens, and the end of it."""

    def __init__(self, command, environment, folder):
        self.errors = folder / "stderr.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=folder
            )
        self.said = self.process.stdout.readline()
        if "serving" not in self.said:
            self.end()
            pytest.fail(f"the server did not start: {self.errors.read_text()}")
        self.url = re.search(r"http://\S+(?=/v1)", self.said).group()

    def get(self, route):
        return httpx.get(self.url + route, timeout=30)

    def ask(self, model, question, **options):
        """One answer's text at temperature 0, by the client that applications use."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            messages = [{"role": "user", "content": question}]
            answer = client.chat.completions.create(model=model, messages=messages, temperature=0, **options)
        return answer.choices[0].message.content

    def stop(self, how=signal.SIGINT):
        """Send the signal and give the exit code; a process that goes on shows where its threads are."""
        self.process.send_signal(how)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(10)
            pytest.fail(f"the server did not end: {self.errors.read_text()}")

    def end(self):
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def serve(process_environment, tmp_path):
    """Start ``darkbloom serve`` on a free port with the arguments given; what still runs ends with the test."""
    running = []

    def start(*arguments, python=sys.executable):
        code = "from darkbloom_core.cli import main; main()"
        command = [str(python), "-X", "faulthandler", "-c", code, "serve", "--port", "0", *arguments]
        running.append(Serving(command, process_environment, tmp_path))
        return running[-1]

    yield start
    for each in running:
        each.end()


class LiveServer:
    """The real server in this process, with both demo checkpoints, the dialects and the web page.

    ``sink`` keeps the telemetry events, ``tables`` are further settings.
    """

    def __init__(self, **tables):
        from at_rest import AtRest
        from toy_server import RecordingSink

        from darkbloom_core.plugins import load_plugins
        from darkbloom_core.server import BackgroundServer, create_app, generation_service
        from darkbloom_core.settings import ServerSettings, Settings
        from darkbloom_core.slots import SlotManager
        from darkbloom_core.telemetry import SinkEmitter

        settings = Settings(server=ServerSettings(route_plugins=("dialects", "webui")), **tables)
        plugins, self.sink = load_plugins(), RecordingSink()
        self._emitter = SinkEmitter([self.sink])
        self._slots = SlotManager(settings, plugins.family_for, self._emitter)
        for name, path in plugins.checkpoints().items():
            self._slots.load(name, path)
        routes = plugins.server_routes(settings)
        app = create_app(self._slots, settings, self._emitter, routes, plugins.report)
        self._server = BackgroundServer(app)
        self.wait_until_idle = AtRest(generation_service(app)).wait
        self.url = self._server.url

    def __enter__(self):
        self._server.__enter__()
        return self

    def __exit__(self, *fault):
        self._server.stop()
        self._slots.close()
        self._emitter.close()

    def status(self, model):
        """The engine's status of one model."""
        return self._slots.get(model).engine.status()


@pytest.fixture(scope="session")
def live_server():
    """One real server for all tests, on a free port, serving ``demo/gpt-oss`` and ``demo/gemma4``."""
    with LiveServer() as server:
        yield server


@pytest.fixture(scope="session")
def quick_server():
    """Like ``live_server``, for tests that do not mind how the engine works: nothing is measured while it warms up."""
    from darkbloom_core.settings import EngineSettings

    with LiveServer(engine=EngineSettings(chain="always", pack="never")) as server:
        yield server
