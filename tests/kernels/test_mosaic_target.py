"""The GPU that kernels are built for."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from deepinfer_jax.kernels.mosaic import architecture, interpret, interpreting

pytestmark = pytest.mark.fast


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What `architecture` reads of a device."""

    compute_capability: str | None
    device_kind: str = "a device"


def test_cpu_is_refused_by_name() -> None:
    """Guards against kernels that are lowered for a device without them and fail far from the cause."""
    with pytest.raises(NotImplementedError, match=r"cpu has compute capability None; there are kernels for 9\.0"):
        architecture()


@pytest.mark.parametrize(("capability", "expected"), [("9.0", "sm90"), ("10.0", "sm100"), ("10.3", "sm100")])
def test_known_devices(monkeypatch: pytest.MonkeyPatch, capability: str, expected: str) -> None:
    """Guards the table of devices."""
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice(capability)])
    assert architecture() == expected


@pytest.mark.parametrize("capability", ["8.0", "8.9", "12.0"])
def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Guards against code for one architecture on another: tensor cores differ, even to newer ones."""
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice(capability, "NVIDIA Other")])
    with pytest.raises(NotImplementedError, match=f"NVIDIA Other has compute capability {capability}"):
        architecture()


def test_interpretation_ends_with_its_context() -> None:
    """Guards against a test that leaves later ones interpreting, also when it fails or nests."""
    assert not interpreting()
    with interpret("sm90"):
        assert interpreting()
        assert architecture() == "sm90"
        with interpret("sm100", detect_races=True):
            assert architecture() == "sm100"
        assert architecture() == "sm90"
    with pytest.raises(RuntimeError, match="inside"), interpret():
        raise RuntimeError("inside")
    assert not interpreting()
