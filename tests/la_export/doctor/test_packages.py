from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from la_export.doctor.packages import (
    PACKAGES,
    Requirement,
    find_range,
    find_version,
    fits,
    normalize,
    parse_requirement,
)

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [
    *(parse_requirement(line) for line in PROJECT["dependencies"]),
    *(
        parse_requirement(f'{line}; extra == "{extra}"')
        for extra, lines in EXTRAS.items()
        for line in lines
    ),
]


def test_every_declared_dependency_of_a_user_is_looked_at() -> None:
    wanted = {r.distribution for r in DECLARED if r.extra != "dev"}

    assert wanted <= {normalize(package.distribution) for package in PACKAGES}


def test_every_package_has_a_declared_range() -> None:
    assert [p.distribution for p in PACKAGES if not find_range(p, DECLARED)] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            'onnxruntime<1.33,>=1.31; extra == "cpu"',
            Requirement(distribution="onnxruntime", specifier=">=1.31,<1.33", extra="cpu"),
        ),
        (
            "huggingface_hub>=2.4,<3",
            Requirement(distribution="huggingface-hub", specifier=">=2.4,<3"),
        ),
        ('wheel; extra == "dev"', Requirement(distribution="wheel", specifier="", extra="dev")),
    ],
)
def test_a_requirement_is_read_in_both_spellings(line: str, expected: Requirement) -> None:
    assert parse_requirement(line) == expected


@pytest.mark.parametrize(
    "line", ["torch[cuda]>=2", 'torch>=2; python_version < "3"', "torch~=2.13", "torch @ x"]
)
def test_a_requirement_of_another_form_is_refused_rather_than_misread(line: str) -> None:
    with pytest.raises(ValueError, match="of a plain form"):
        parse_requirement(line)


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14", ">=2.13,<2.14", False),
        ("2.9", ">=2.13", False),
        ("10.16.1.11", ">=10.15,<12", True),
        ("12.0.0", ">=10.15,<12", False),
        ("0.1.2", "==0.1.2", True),
        ("0.1.2.0", "==0.1.2", True),
        ("0.1.3", "==0.1.2", False),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_number_by_number(
    version: str, specifier: str, expected: bool
) -> None:
    assert fits(version, specifier) is expected


def test_every_declared_range_holds_its_own_lower_end() -> None:
    for requirement in DECLARED:
        for clause in filter(None, requirement.specifier.split(",")):
            if clause.startswith((">=", "==")):
                assert fits(clause[2:], requirement.specifier)


def test_an_installed_version_is_found_and_a_missing_one_is_empty() -> None:
    found = {package.distribution: find_version(package) for package in PACKAGES}

    assert found["numpy"].count(".") == 2
    assert found["tensorrt"] == ""
