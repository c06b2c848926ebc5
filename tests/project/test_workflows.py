"""The workflows hold no logic: each of their commands is a target of the Makefile."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.once


ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
VERSIONS = re.findall(r"^VERSIONS := (.+)$", MAKEFILE, re.M)[0].split()
WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text())
    for file in (ROOT / ".github/workflows").iterdir()
}
JOBS = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]


def targets(job: dict[str, Any]) -> Iterator[str]:
    """What `make` is told to do, for each target of the job's matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        if "run" in step:
            for target in matrix.get("target", [""]):
                yield step["run"].replace("${{ matrix.target }}", target)


def test_each_command_is_a_target():
    rules = re.findall(r"^([a-z][\w%-]*(?: [a-z][\w%-]*)*):(?!=)", MAKEFILE, re.M)
    names = {name for rule in rules for name in rule.split()}
    patterns = [re.compile(name.replace("%", ".+")) for name in names]
    commands = [command for job in JOBS for command in targets(job)]
    assert len(commands) > 8
    for command in commands:
        make, target = command.split()
        assert make == "make"
        assert any(pattern.fullmatch(target) for pattern in patterns), target


def test_all_that_has_to_pass_is_tested_on_all_pythons():
    [job] = WORKFLOWS["tests"]["jobs"].values()
    tested = {command.removeprefix("make ") for command in targets(job)}
    others = {f"pytest-{version}" for version in VERSIONS[1:]}
    once = {"lint", "actionlint", "types", "docs"}
    assert tested == once | {"pytest", "pytest-lowest"} | others
    for job in JOBS:
        for step in job["steps"]:
            if "setup-python" in step.get("uses", ""):
                assert {*step["with"]["python-version"].split()} <= {*VERSIONS}


def test_only_what_publishes_may_write():
    """A token that leaks from a test can publish nothing."""
    for name, workflow in WORKFLOWS.items():
        assert name == "docs" or workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            publishes = any("pypi-publish" in s.get("uses", "") for s in job["steps"])
            permitted = {"id-token": "write"} if publishes else None
            assert job.get("permissions") == permitted
            assert "timeout-minutes" in job
            assert not publishes or not [*targets(job)]
