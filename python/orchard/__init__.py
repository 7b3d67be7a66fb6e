"""Orchard: exact fused attention, forward and backward."""

from ._library import OrchardError, version
