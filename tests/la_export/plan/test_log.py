from __future__ import annotations

import logging

import pytest

from la_export.plan.log import make_log
from la_export.plan.namespace import Installation


def test_errors_are_kept_until_they_are_taken(installation: Installation) -> None:
    severities = installation.trt.ILogger
    log = make_log(installation.trt)

    log.log(severities.ERROR, "first")
    log.log(severities.INTERNAL_ERROR, "second")
    log.log(severities.VERBOSE, "no error")

    assert log.take_errors() == ("first", "second")
    assert log.take_errors() == ()


def test_nothing_is_logged_above_info(
    installation: Installation, caplog: pytest.LogCaptureFixture
) -> None:
    log = make_log(installation.trt)

    with caplog.at_level(logging.DEBUG):
        log.log(installation.trt.ILogger.ERROR, "graph 100% wrong")
        log.log(installation.trt.ILogger.VERBOSE, "a detail")

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "graph 100% wrong"),
        ("DEBUG", "a detail"),
    ]


def test_message_that_names_the_layers_is_kept(installation: Installation) -> None:
    log = make_log(installation.trt)
    assert log.layers is None

    log.log(installation.trt.ILogger.VERBOSE, "Layers:\nName: a, LayerType: b")
    log.log(installation.trt.ILogger.VERBOSE, "something else")

    assert log.layers == "Layers:\nName: a, LayerType: b"
