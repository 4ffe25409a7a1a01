"""Speculation policy as pure logic."""
