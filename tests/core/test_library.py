"""Compiled code is loaded from nowhere that others can write to, made anew where it does not load; its lack is told."""
