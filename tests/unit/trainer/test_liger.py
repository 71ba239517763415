"""What keeps Liger's kernels out is told with its cure."""

import sys

import pytest
from torch import nn

from trainer.model.liger import use_liger


def test_a_missing_package_is_told_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'offbeat\[liger\]'"):
        use_liger(nn.Linear(1, 1))
