"""pytest side of the gate: the ledger's known misses become strict expected failures."""

from __future__ import annotations

import os

import pytest

from .ledger import load_ledger

CASES = pytest.StashKey[dict]()
SANITIZERS = pytest.StashKey[dict]()
_REPORTED: list[tuple[str, str, bool]] = []


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: run the kernels on this GPU")
    parser.addoption("--replant", action="store_true", help="plant the kernels' wrongs that are on record too")
    parser.addoption("--family", action="append", help="device cases and sanitizers of this family alone; repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The gate uses two cores where nobody says otherwise; a GPU takes one case at a time, and so does a debugger."""
    option = config.option
    asked = getattr(option, "numprocesses", 0) is not None or option.usepdb or option.collectonly
    if asked or hasattr(config, "workerinput") or option.device == "cuda" or (os.cpu_count() or 1) < 2:
        return
    option.numprocesses, option.dist, option.benchmark_disable = 2, "worksteal", True


def pytest_sessionstart(session):
    session.config.stash[CASES], session.config.stash[SANITIZERS] = {}, {}


def pytest_runtest_logreport(report):
    """Notes what became of a wrong planted in a kernel, in the process that gathers the reports."""
    for name, value in report.user_properties if report.when == "call" else ():
        if name == "wrong":
            _REPORTED.append((*value, report.passed))


def _note_wrongs() -> None:
    from . import planted
    from .test_device_mutations import WRONGS

    names = {f"{family}: {name}" for family, wrongs in WRONGS.items() for name in wrongs}
    planted.note({name: key for name, key, passed in _REPORTED if passed},
                 {name for name, _, passed in _REPORTED if not passed}, names)  # fmt: skip


def pytest_sessionfinish(session):
    """What a GPU run found enters the GPU's record, noticed wrongs enter theirs."""
    if _REPORTED and not hasattr(session.config, "workerinput"):
        _note_wrongs()
    passed, verdicts = session.config.stash.get(CASES, {}), session.config.stash.get(SANITIZERS, {})
    if session.config.getoption("--device") == "cuda" and (passed or verdicts):
        from .chain_cases import chain_cases
        from .device_cases import cases, device_ops
        from .device_record import update

        update(passed, [*cases(device_ops()), *chain_cases()], verdicts, chosen=session.config.getoption("--family"))


@pytest.fixture(scope="module")
def device(request):
    """Where kernels run: on the GPU with ``--device cuda``, on the emulated one otherwise."""
    from .device_run import Cuda, Emulated  # the very classes that the tests import
    from .emulation import compiler

    if request.config.getoption("--device") == "cuda":
        return Cuda()
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    return Emulated()


@pytest.fixture
def record_case(request):
    """Notes that a device case passed, how far from truth; a GPU run writes the notes into its record."""
    return request.config.stash[CASES].__setitem__


@pytest.fixture
def sanitizer_verdicts(request):
    """Verdicts by tool, for the record."""
    return request.config.stash[SANITIZERS]


def pytest_collection_modifyitems(config, items):
    if not config.getoption("-m"):  # minutes of compiling: CI's own step, and `-m mutation`, plant these
        _leave_out(config, items, lambda item: item.get_closest_marker("kernel_mutation") is not None)
    elif not config.getoption("--replant"):
        _leave_out_known_wrongs(config, items)
    if chosen := config.getoption("--family"):
        _leave_out(config, items, lambda item: _family(item) not in (None, *chosen))
    misses = {miss.check: miss for miss in load_ledger().misses}
    for item in items:
        name = item.callspec.id if item.originalname == "test_generic" else item.name
        if name in misses:
            miss = misses[name]
            item.add_marker(pytest.mark.xfail(reason=f"issue {miss.issue}: {miss.reason}", strict=True))


def _leave_out(config, items, which) -> None:
    """Take the items for which `which` holds out of the run, and say so."""
    out = [item for item in items if which(item)]
    config.hook.pytest_deselected(items=out)
    gone = set(map(id, out))
    items[:] = [item for item in items if id(item) not in gone]


def _leave_out_known_wrongs(config, items) -> None:
    """Wrongs that were noticed as they are, from source and cases as they are, need no second time."""
    from . import planted

    record = planted.recorded()

    def known(item) -> bool:
        if "test_device_mutations" not in item.nodeid or "family" not in getattr(item, "fixturenames", ()):
            return False
        family, name = (item.callspec.params[key] for key in ("family", "name"))
        return planted.known(family, name, item.module.WRONGS[family][name], record)

    _leave_out(config, items, known)


def _family(item) -> str | None:
    """The family of a device case; None for other tests."""
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return getattr(case, "family", None)
