"""The errors a user can meet, and the exit code each one ends a command with.

    LookaheadError                 1  the work was tried and failed
    ├── UsageError                 2  the call cannot be right as written
    │   └── UnknownModelError         no such model name
    ├── BundleError                1  the bundle is not what it says it is
    │   ├── BundleVersionError        made by a newer, incompatible version
    │   └── DigestError               a file's bytes are not the recorded ones
    ├── CheckpointError            1  the source model cannot be used
    │   └── UnsupportedModelError     it has a feature that is not exported yet
    ├── CheckError                 1  a built artefact failed its own check
    ├── NonFiniteScoreError        1  the model produced NaN or infinity
    └── HostError                  4  disk, device, driver, package or network

Every message says what was wrong, what was got, what was expected and what to do.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "BundleError",
    "BundleVersionError",
    "CheckError",
    "CheckpointError",
    "DigestError",
    "ExitCode",
    "HostError",
    "LookaheadError",
    "NonFiniteScoreError",
    "UnknownModelError",
    "UnsupportedModelError",
    "UsageError",
]


class ExitCode(IntEnum):
    """Exit codes of both commands."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    COULD_NOT_RUN = 3
    ENVIRONMENT = 4
    INTERRUPTED = 130


class LookaheadError(Exception):
    """Base of every error caused by input, files or the machine rather than by a bug."""

    exit_code = ExitCode.FAILED


class UsageError(LookaheadError, ValueError):
    """An argument is impossible or out of range."""

    exit_code = ExitCode.USAGE


class UnknownModelError(UsageError):
    """A model name that is no folder, file, hub id or known name."""


class BundleError(LookaheadError):
    """A bundle is missing, incomplete, unsafe or inconsistent."""


class BundleVersionError(BundleError):
    """A bundle written by a newer major version."""


class DigestError(BundleError):
    """A file whose bytes differ from the digest recorded in the manifest."""


class CheckpointError(LookaheadError):
    """A source checkpoint that cannot be read."""


class UnsupportedModelError(CheckpointError):
    """A model that uses a feature which export does not support yet."""


class CheckError(LookaheadError):
    """A freshly built artefact that failed a check; no bundle was written."""


class NonFiniteScoreError(LookaheadError):
    """A score that is NaN or infinite, with the request and position it belongs to."""


class HostError(LookaheadError):
    """The machine lacks something: disk space, a device, a driver, a package, the network."""

    exit_code = ExitCode.ENVIRONMENT
