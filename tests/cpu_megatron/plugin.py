"""Pytest plugin: megatron on the CPU, with the overlay unless ``MEGATRON_OVERLAY=0``."""

import tests.cpu_megatron as cpu_megatron

cpu_megatron.install()
cpu_megatron.activate_overlay()
