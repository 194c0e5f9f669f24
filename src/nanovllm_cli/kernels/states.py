"""What layers with a recurrence keep of sequences, on any device: the gated delta rule's, and Mamba-2's.

What a token needs of those before it is a matrix a value head and the last inputs of a convolution. A state has two places for
them, with a stamp that says behind how many tokens of the sequence a place is. A step reads one and writes the other, so it can
be repeated. Of guesses, which may have to be taken back, only what goes into the rule is kept, beside the place that is behind
the last known token: the next step goes through those of them again that held, and changes the matrix for good. That is little
beside the matrix, which is read and written once a step either way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ByChannel(NamedTuple):
    """What a delta rule with a decay of each channel reads beside b, in place of a: rates [T, V * E] fp32; and z [T, V * D],
    which its outputs are multiplied with sigmoids of. floor: the least logarithm of what is kept, below 0; 0: there is none. See
    `state_rules.channel_delta`."""

    rates: torch.Tensor
    z: torch.Tensor
    floor: float = 0.0


class States(NamedTuple):
    """Of N states, with V value heads of D dims, keys of E, a convolution over `width` tokens, and room for G guesses.

    matrices [N, 2, V, E, D] fp32: the matrices.  inputs [N, 2, width - 1, channels]: the convolution's last.
    guesses [N, 2, G, channels], guess_gates [N, 2, G, gates] fp32: of the tokens behind that, as the layer projected them.
    stamps, reaches [N, 2, V] int32: behind how many tokens matrices and inputs are, and the last of the guesses; of each head, as
    heads are written one by one. A stamp of 0 says that nothing is there.
    """

    matrices: torch.Tensor
    inputs: torch.Tensor
    guesses: torch.Tensor
    guess_gates: torch.Tensor
    stamps: torch.Tensor
    reaches: torch.Tensor
