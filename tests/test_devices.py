import pytest
import torch

from driftlab import DriftlabError
from driftlab.devices import usable_device


def test_a_device_that_is_there():
    assert usable_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(DriftlabError, match=f"{name}.*cannot be used"):
        usable_device(name)
