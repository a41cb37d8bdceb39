"""The project's outside: exported names, what the wheel holds, what an import loads."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "engine", "parsers", "conformance")


@pytest.mark.parametrize("room", ["gateway", "parsers", "conformance", "engine", "engine.plan"])
def test_pure_rooms_load_no_torch(room: str) -> None:
    """Importing a room costs no GPU stack."""
    code = (
        f"import sys, {room}; "
        "print([m for m in ('torch', 'triton', 'flashinfer') if m in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"


def test_an_import_of_torch_would_be_seen() -> None:
    """The check above can fail: the same probe finds torch where it is imported."""
    code = "import sys, engine.model.v4; print('torch' in sys.modules)"

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "True"


def test_tests_run_on_one_thread_each() -> None:
    """The suite's processes do not wait for threads: what says so is set before torch is loaded."""
    code = "import tests.conftest, torch; print(torch.get_num_threads())"
    free = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=free, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "1"


def test_rooms_share_one_parent_folder() -> None:
    """The four generic names are ours and not another distribution's."""
    parents = {Path(str(importlib.import_module(r).__file__)).parents[1] for r in ROOMS}

    assert len(parents) == 1


@pytest.mark.parametrize("room", ROOMS)
def test_all_lists_only_names_that_exist(room: str) -> None:
    """What `__all__` promises can be imported."""
    module = importlib.import_module(room)

    assert [n for n in getattr(module, "__all__", []) if not hasattr(module, n)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("*.whl")
    return path


def test_wheel_is_exactly_the_four_rooms(wheel: Path) -> None:
    """The wheel holds every tracked file of the four rooms, its own metadata, and nothing else."""
    tracked = subprocess.run(
        ["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    with zipfile.ZipFile(wheel) as z:
        names = {n for n in z.namelist() if ".dist-info/" not in n}

    assert set(tracked) == names


def test_wheel_fits_twenty_megabytes(wheel: Path) -> None:
    """The checkpoint that ships keeps the wheel small (issue 2: at most 20 MB)."""
    assert wheel.stat().st_size <= 20_000_000


PLANTED = {
    "torch in the gateway": ("gateway/settings.py", "import torch", "pure rooms load no GPU stack"),
    "asyncio in the parsers": ("parsers/values.py", "import asyncio", "parsers do no I/O"),
    "a second speaker to the codec": (
        "parsers/values.py",
        "import deepseek_recipe",
        "one module speaks to the codec",
    ),
    "a second door to the engine": (
        "gateway/app.py",
        "import engine.thread",
        "one door to the engine's thread",
    ),
    "the suite knows the server": (
        "conformance/sse.py",
        "import parsers",
        "conformance stands alone",
    ),
    "a plan that knows the model": (
        "engine/plan/blocks.py",
        "import engine.model.v4",
        "the engine's floors",
    ),
    "the engine answers HTTP": (
        "engine/core.py",
        "import starlette",
        "the engine has no HTTP, tools or codec",
    ),
    "parsers know the engine": (
        "parsers/values.py",
        "import engine.api",
        "gateway sits on engine and parsers, which do not know each other",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint_imports(folder: Path) -> dict[str, bool]:
    """Contract name to whether it is kept, as import-linter prints them."""
    tool = Path(sys.executable).with_name("lint-imports")
    out = subprocess.run(
        [str(tool), "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    ).stdout
    # "name KEPT", or "name KEPT (1 ignored import)"
    found = re.findall(r"^(.+?) (KEPT|BROKEN)(?: \(.*\))?$", out, re.MULTILINE)
    return {name: state == "KEPT" for name, state in found}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_import_breaks_its_contract(copy: Path, name: str) -> None:
    """Each import contract catches the import it is there for, and names itself."""
    file, line, contract = PLANTED[name]
    path = copy / file
    before = path.read_text()
    path.write_text(before + f"\n{line}\n")

    found = lint_imports(copy)
    path.write_text(before)

    assert found[contract] is False


def test_the_contracts_are_kept_without_planted_imports(copy: Path) -> None:
    """The copy itself breaks nothing, and every contract has its planted fault."""
    found = lint_imports(copy)

    assert all(found.values())
    assert {contract for _, _, contract in PLANTED.values()} == set(found)
