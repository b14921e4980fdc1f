"""Imported once by the fork server: every rank of every run starts with megatron loaded."""

import tests.cpu_megatron as cpu_megatron

cpu_megatron.install()
cpu_megatron.activate_overlay()

import megatron.training  # noqa: E402, F401
import megatron.training.argument_utils  # noqa: E402, F401
import megatron.training.arguments  # noqa: E402, F401

import tests.cpu_megatron.models  # noqa: E402, F401
