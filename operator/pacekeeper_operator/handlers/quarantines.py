"""A daemon for each NodeQuarantine; registered with kopf by importing this module."""
