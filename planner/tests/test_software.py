"""The driver's version is read where the kernel says it; versions that differ are named."""

import dataclasses

import pytest
import torch

from stream_attention.planner import software
from stream_attention.planner.software import differing, driver_version, software_here
from stream_attention.planner.testing import FINGERPRINT

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Jun  3 21:39:27 UTC 2025"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.65  Release Build  (me@there)"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (CLOSED + "\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14) \n", "580.159.04"),
        (OPEN + "\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14) \n", "570.65"),
        ("", None),
        ("nothing of the kind", None),
    ],
)
def test_the_driver_names_its_version(text, version, tmp_path):
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_version(path) == version


def test_without_a_driver_there_is_no_version(tmp_path):
    assert driver_version(tmp_path / "nowhere") is None


def test_the_versions_here_are_those_of_this_process():
    here = software_here()
    assert here["torch"] == torch.__version__ and here["cuda"] == torch.version.cuda
    assert set(here) <= {field.name for field in dataclasses.fields(FINGERPRINT)}


def test_what_differs_is_named_with_both_versions(monkeypatch):
    here = {"driver": None, "cuda": "13.0", "torch": "2.13.0", "triton": "3.6.0"}
    monkeypatch.setattr(software, "software_here", lambda: here)
    measured = dataclasses.replace(FINGERPRINT, driver="580.0", cuda="12.8", torch="2.13.0")
    assert differing(measured) == (("driver", "580.0", "unknown"), ("cuda", "12.8", "13.0"))
    unknown = dataclasses.replace(measured, driver=None, cuda=None, triton=None)
    assert differing(unknown) == ()
