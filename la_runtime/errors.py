"""The errors a user can meet, and the exit code each one ends a command with.

    LookaheadError                 1  the work was tried and failed
    ├── UsageError                 2  the call cannot be right as written
    │   └── UnknownModelError         no such model name
    ├── BundleError                1  the bundle is not what it says it is
    │   ├── BundleVersionError        made by a newer, incompatible version
    │   ├── DigestError               a file's bytes are not the recorded ones
    │   └── CertificateError          it is required to be verified here and is not
    ├── CheckpointError            1  the source model cannot be used
    │   └── UnsupportedModelError     it has a feature that is not exported yet
    ├── CheckError                 1  a built artefact failed its own check
    ├── PlanError                  1  TensorRT cannot build a plan of the graph
    ├── NotRunError                3  a verification could not be carried out
    ├── NonFiniteScoreError        1  the model produced NaN or infinity
    ├── QueueFullError             3  too many requests are waiting
    └── HostError                  4  disk, device, driver, package or network

Every message says what was wrong, what was got, what was expected and what to do.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "BundleError",
    "BundleVersionError",
    "CertificateError",
    "CheckError",
    "CheckpointError",
    "DigestError",
    "ExitCode",
    "HostError",
    "LookaheadError",
    "NonFiniteScoreError",
    "NotRunError",
    "PlanError",
    "QueueFullError",
    "UnknownModelError",
    "UnsupportedModelError",
    "UsageError",
]


class ExitCode(IntEnum):
    """Exit codes of both commands.

    ``DONE``: done; for a check, passed.
    ``FAILED``: tried, and failed: a damaged bundle, an unusable model, a check not passed.
    ``USAGE``: the command line cannot be right as written.
    ``COULD_NOT_RUN``: a check could not be run, or a queue was full: nothing is known.
    ``ENVIRONMENT``: the machine lacks something: disk space, device, driver, package, network.
    ``INTERRUPTED``: ended by Ctrl-C.
    """

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


class CertificateError(BundleError):
    """A bundle without a certificate for the backend, or whose certificate is of other bytes."""


class CheckpointError(LookaheadError):
    """A source checkpoint that cannot be read."""


class UnsupportedModelError(CheckpointError):
    """A model that uses a feature which export does not support yet."""


class CheckError(LookaheadError):
    """A freshly built artefact that failed a check; no bundle was written."""


class PlanError(LookaheadError):
    """A graph of which TensorRT cannot build a plan; no plan was written."""


class NotRunError(LookaheadError):
    """A verification that could not be carried out, so that nothing is known."""

    exit_code = ExitCode.COULD_NOT_RUN


class NonFiniteScoreError(LookaheadError):
    """A score that is NaN or infinite, with the request and position it belongs to."""


class QueueFullError(LookaheadError):
    """The engine has as many waiting requests as it may; ask again later."""

    exit_code = ExitCode.COULD_NOT_RUN


class HostError(LookaheadError):
    """The machine lacks something: disk space, a device, a driver, a package, the network."""

    exit_code = ExitCode.ENVIRONMENT
