"""Servers and faults that the tests run against."""
