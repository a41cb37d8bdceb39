"""The command line, over HTTP against the correct server."""

from __future__ import annotations

import ast
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import orjson
import pytest

from conformance import cli
from conformance.report import matrix, record


def conform(*arguments: str) -> int:
    return cli.main(list(arguments))


@pytest.fixture(scope="module")
def report(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    forms = [f"--{form}={folder / form}" for form in ("json", "junit", "html", "markdown", "badge")]

    assert conform("run", "--base-url", base_url, "--protocol", "all", *forms) == 0
    return folder


def test_run_passes_and_writes_every_report(report: Path) -> None:
    """A run against a correct endpoint ends with 0 and leaves each report in its form."""
    data = record.load(report / "json")

    assert (data["failed"], data["counts"]["fail"]) == (False, 0)
    assert len(data["results"]) > 600
    suite = ET.fromstring((report / "junit").read_text())
    assert str(len(data["results"])) == suite.get("tests")
    assert "call/one" in (report / "html").read_text()
    assert "| chat call |" in (report / "markdown").read_text()
    ET.fromstring((report / "badge").read_text())


def test_wrong_expectation_fails_and_shows_bytes(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failing case ends with 1, tells why, and gives the curl line and raw bytes."""
    case = {
        "id": "mine/never",
        "tier": "scripted",
        "why": "Something this endpoint does not say.",
        "source": "a test",
        "script": {"output": "x"},
        "expect": {"content": "never said"},
        "protocols": ["chat"],
        "modes": ["whole"],
    }
    (tmp_path / "mine.json").write_bytes(orjson.dumps({"cases": [case]}))
    found = conform(
        *("run", "mine/", "--base-url", base_url, "--model", "m"),
        *("--cases", str(tmp_path), "--json", str(tmp_path / "out")),
        *("--html", str(tmp_path / "html"), "--junit", str(tmp_path / "junit")),
    )
    out = capsys.readouterr().out

    assert found == 1
    assert "expect/content" in out
    assert "curl -sS -N -i -X POST" in out
    result = record.load(tmp_path / "out")["results"][0]
    assert b"chat.completion" in b"".join(map(_bytes, result["exchange"]["reads"]))
    assert "chat.completion" in (tmp_path / "html").read_text()
    assert ET.fromstring((tmp_path / "junit").read_text()).get("failures") == "1"


def _bytes(read: list[str]) -> bytes:
    import base64

    return base64.b64decode(read[1])


def test_endpoint_without_scripts_is_told(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no prescribed answer arrives the report says so, and which checks failed how often."""
    cases = [
        {
            "id": f"mine/unknown-{number}",
            "tier": "scripted",
            "why": "A script that the endpoint was never given.",
            "source": "a test",
            "script": {"output": "said behind the endpoint"},
            "expect": {"content": "said behind the endpoint", "finish": "length"},
            "protocols": ["chat"],
        }
        for number in range(3)
    ]
    (tmp_path / "mine.json").write_bytes(orjson.dumps({"cases": cases}))
    arguments = ["run", "--base-url", base_url, "--model", "m", "--cases", str(tmp_path)]

    assert conform(*arguments, "mine/") == 1
    told = capsys.readouterr().out
    assert "0 of 6 prescribed answers arrived" in told
    assert "failed checks: expect/content 6, expect/finish 6" in told
    assert conform(*arguments, "utf8/") == 0
    assert "prescribed" not in capsys.readouterr().out


def test_curl_line_repeats_the_request(base_url: str, tmp_path: Path) -> None:
    """The curl line of a report, run by a shell, gets the same answer."""
    conform(
        *("run", "refuse/body-bad-utf8", "--base-url", base_url, "--model", "m"),
        *("--expected-failures", str(_lines(tmp_path, "nothing* x  # never"))),
        *("--json", str(tmp_path / "out")),
    )
    assert record.load(tmp_path / "out")["counts"]["pass"] == 1


def _lines(folder: Path, text: str) -> Path:
    path = folder / "expected"
    path.write_text(text + "\n")
    return path


def test_stale_entry_fails(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An expected failure that no longer fails ends with 1 and is named."""
    path = _lines(tmp_path, "call/one[* expect/calls  # mended long ago")

    assert (
        conform(
            *("run", "call/one", "--base-url", base_url, "--model", "m"),
            *("--expected-failures", str(path)),
        )
        == 1
    )
    assert "STALE expected-failures line 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--base-url", "http://127.0.0.1:9"],
        ["run", "--base-url", "http://127.0.0.1:9", "--model", "m", "no/such/case"],
        ["run", "--base-url", "http://127.0.0.1:9", "--model", "m", "--protocol", "smoke"],
        ["run", "--base-url", "http://127.0.0.1:9", "--model", "m", "--unsupported", "speech"],
        ["run", "--base-url", "http://127.0.0.1:9", "--model", "m", "--cases", "/no/such/folder"],
        ["show", "no/such/case"],
        ["diff", "/no/such/a.json", "/no/such/b.json"],
    ],
)
def test_misuse_ends_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that cannot be carried out says why and ends with 2."""
    assert conform(*arguments) == 2
    assert capsys.readouterr().err.startswith("bathyal-conform: ")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:9", "--base-url: expected an http or https URL, got '127.0.0.1:9'"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9 does not answer: ConnectError"),
    ],
)
def test_an_endpoint_whose_model_cannot_be_asked_is_told(
    url: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever mistypes the address reads so, and is not told to name a model."""
    assert conform("run", "--base-url", url) == 2
    assert message in capsys.readouterr().err


def test_an_endpoint_that_lists_no_model_is_told(
    base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the reply, and what to do."""
    assert conform("run", "--base-url", f"{base_url}/none") == 2
    said = capsys.readouterr().err
    assert f"{base_url}/none/v1/models names no model (status 200: " in said
    assert said.endswith("; give --model\n")


def test_nobody_at_home_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """An endpoint that is not there is an error, and no verdict about the protocol."""
    assert conform("run", "call/one", "--base-url", "http://127.0.0.1:9", "--model", "m") == 1
    assert "error http/complete: ConnectError" in capsys.readouterr().out


def test_unsupported_is_skipped_and_not_passed(base_url: str, tmp_path: Path) -> None:
    """A declared gap is a skip with its reason."""
    conform(
        *("run", "call/one", "--base-url", base_url, "--model", "m", "--protocol", "all"),
        *("--unsupported", "messages", "--json", str(tmp_path / "out")),
    )
    data = record.load(tmp_path / "out")

    skipped = [r for r in data["results"] if r["verdict"] == "skip"]
    assert {"messages"} == {r["protocol"] for r in skipped}
    assert skipped[0]["checks"][0]["message"] == "declared unsupported: messages"
    assert data["counts"]["pass"] == len(data["results"]) - len(skipped)


def test_show_list_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    """show prints a case with the requests it sends; list prints one line a case."""
    assert conform("show", "call/one") == 0
    assert "/v1/messages" in capsys.readouterr().out
    assert conform("show", "usage/adds-up") == 0
    assert conform("list", "--profile", "full") == 0
    assert len(capsys.readouterr().out.splitlines()) > 300
    assert conform("list", "--checks") == 0
    assert "stream/tool-call/index-dense" in capsys.readouterr().out


def test_diff_tells_regressions(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that got worse, or a variant that is gone, is a regression; the rest is not."""
    data = record.load(report / "json")
    same = tmp_path / "same.json"
    record.dump(data, same)
    assert conform("diff", str(report / "json"), str(same)) == 0
    data["results"][0]["checks"][0]["verdict"] = "fail"
    del data["results"][-1]
    record.dump(data, tmp_path / "worse.json")
    capsys.readouterr()

    assert conform("diff", str(same), str(tmp_path / "worse.json")) == 1
    assert "2 regressions, 0 improvements" in capsys.readouterr().out
    assert conform("diff", str(tmp_path / "worse.json"), str(same)) == 0


def test_page_of_two_endpoints(report: Path, tmp_path: Path) -> None:
    """Two reports give one page with a column each."""
    one = str(report / "json")
    both = ("--html", str(tmp_path / "page"), "--markdown", str(tmp_path / "table"))

    assert conform("page", one, one, *both) == 0
    assert "| area | http://127.0.0.1" in (tmp_path / "table").read_text()
    assert (tmp_path / "page").read_text().count("<th>http://127.0.0.1") == 2


def test_matrix_shows_a_failure_with_its_rule(report: Path, tmp_path: Path) -> None:
    """In the Markdown matrix a failure has the variant, what came and where the rule is from."""
    data = record.load(report / "json")
    broken = next(r for r in data["results"] if r["case"] == "call/one")
    broken["verdict"] = "fail"
    broken["checks"][0] |= {"verdict": "fail", "message": "got | and `x`\n"}
    text = matrix.render([record.load(report / "json"), data])
    row = next(line for line in text.splitlines() if broken["variant"] in line)

    assert [cell.strip() for cell in row.split(" | ")] == [
        f"| {broken['checks'][0]['check']}",
        "1 in 1 cases",
        f"`{broken['variant']}`",
        "`got \\| and 'x'\ufffd`",
        f"{broken['source']} |",
    ]
    assert "No failure." in text


def test_page_without_a_form_is_misuse(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page that would be written nowhere is refused with the choice."""
    assert conform("page", str(report / "json")) == 2
    assert "--html FILE or --markdown FILE" in capsys.readouterr().err


def test_tokenizer_tables_are_opt_in(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of one tokenizer are skipped until the endpoint is said to have it."""
    table = Path(__file__).parents[1] / "data" / "prompt_tiny.json"
    command = ("run", "prompt-tiny/plain", "--tier", "prompt", "--base-url", base_url)
    command += ("--model", "m", "--cases", str(table))

    assert conform(*command) == 0
    assert "2 skip" in capsys.readouterr().out
    assert conform(*command, "--supported", "tiny-tokenizer") == 1  # that server knows other cases
    assert "prompt tokens" in capsys.readouterr().out


def test_key_stays_out_of_reports(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API key is in no report; the curl line names the variable."""
    monkeypatch.setenv("A_KEY", "sk-very-secret")
    conform(
        *("run", "call/one", "--base-url", base_url, "--model", "m", "--key-env", "A_KEY"),
        *("--json", str(tmp_path / "out"), "--html", str(tmp_path / "html")),
    )

    assert "sk-very-secret" not in (tmp_path / "out").read_text() + (tmp_path / "html").read_text()


def test_live_repeats_report_pass_power(base_url: str, tmp_path: Path) -> None:
    """Repeated live runs give a share with an interval."""
    assert (
        conform(
            *("run", "live/one-tool", "--tier", "live", "--base-url", base_url, "--model", "m"),
            *("--repeat", "3", "--json", str(tmp_path / "out")),
        )
        == 0
    )
    check = record.load(tmp_path / "out")["results"][0]["checks"][0]

    assert (
        check["repeats"]["runs"],
        check["repeats"]["passed"],
        check["repeats"]["pass_power"]["3"],
    ) == (3, 3, 1.0)
    assert 0.4 < check["repeats"]["interval"][0] < 0.5


def test_suite_needs_three_packages() -> None:
    """httpx, orjson and jsonschema are enough: docs/conformance.md installs no more than these."""
    names = set()
    for path in Path(cli.__file__).parent.rglob("*.py"):
        if path.name == "pytest_plugin.py":
            continue  # imported by pytest alone
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])

    assert names - sys.stdlib_module_names - {"conformance"} == {"httpx", "orjson", "jsonschema"}


def test_module_runs_without_torch() -> None:
    """The suite starts without loading torch, and `python -m conformance` is its command."""
    code = (
        "import sys, conformance.cli; sys.exit('torch' in sys.modules or 'gateway' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    subprocess.run([sys.executable, "-m", "conformance", "list"], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("more", "pick", "passed"),
    [
        ([], "call/one and whole", 4),
        (["--conform-tier", "parse"], "parse/one", 2),
        (["--conform-tier", "live", "--conform-protocol", "messages"], "live/plain", 4),
        (["--conform-profile", "full"], "choices/two", 6),
    ],
)
def test_pytest_plugin_runs_variants(
    base_url: str, tmp_path: Path, more: list[str], pick: str, passed: int
) -> None:
    """The plugin makes a test of each variant of the tiers, profile and protocols asked for."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conformance.pytest_plugin",
            "-q",
            "-p",
            "no:cacheprovider",
            "--conform-url",
            base_url,
            "--conform-model",
            "m",
            "-c",
            "/dev/null",
            "--rootdir",
            ".",
            *more,
            "-k",
            pick,
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )

    assert f"{passed} passed" in done.stdout, done.stdout + done.stderr
