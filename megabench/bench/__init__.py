"""Measurement: ops and steps of real cases, timed so that the numbers can be defended."""

from __future__ import annotations
