"""Amends upstream's load planner: it tells what it has read."""

from megatron.core.dist_checkpointing.read_record import NotesReads

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)


class MCoreLoadPlanner(NotesReads, upstream.MCoreLoadPlanner):  # type: ignore[name-defined]
    """Upstream's, which notes what arrives in the current ``ReadRecord``."""
