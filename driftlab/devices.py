"""Devices and dtypes by name, with an error that says what is there."""

from __future__ import annotations

import torch

from driftlab.errors import DriftlabError


def usable_device(device: str | torch.device) -> torch.device:
    """Return the device. Raises DriftlabError if torch does not know it or cannot put a tensor on it here."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DriftlabError(
            f"device {str(device)!r} cannot be used ({reason}); CUDA devices seen: {torch.cuda.device_count()}. Use 'cpu'"
        ) from error
    return found
