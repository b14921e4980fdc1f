"""Amends upstream's load planner: it tells what it has read."""

import megatron_overlay
from megatron.core.dist_checkpointing.read_record import NotesReads

upstream = megatron_overlay.upstream(__name__)


class MCoreLoadPlanner(NotesReads, upstream.MCoreLoadPlanner):
    """Upstream's, which notes what arrives in the current ``ReadRecord``."""
