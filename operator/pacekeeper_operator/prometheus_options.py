"""What the platform requires of each Prometheus query in addition to credentials: headers and matchers. Pure.

Headers name a tenant (`X-Scope-OrgID`) or pass a gateway. Matchers (`cluster="a"`) are added to each selector of the
operator's own queries, for a Prometheus that holds the series of several clusters.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value, parse_json

Headers = tuple[tuple[str, str], ...]
"""(name, value)"""
Matchers = tuple[str, ...]

_HEADER_NAME_PATTERN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_HEADER_VALUE_PATTERN = re.compile(r"[!-~]([ -~]*[!-~])?")
_MATCHER_PATTERN = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*) *(?:=~|!~|!=|=) *"(?:[^"\\\n]|\\[\\"abfnrtv])*"')
_RESERVED_LABELS = {"__name__": "the queries' own", "pacekeeper_query": "reserved to distinguish the queries' answers"}


def parse_headers(text: str) -> Headers:
    """Parse a JSON object of names and values. Raises InputError, which shows no value."""
    try:
        headers = parse_json(text)
    except ValueError as error:
        raise InputError('this is not JSON: write an object like {"X-Scope-OrgID": "training"}') from error
    if not isinstance(headers, dict):
        raise InputError('write an object like {"X-Scope-OrgID": "training"}')
    for name, value in headers.items():
        if not _HEADER_NAME_PATTERN.fullmatch(name):
            raise InputError(f"{abbreviate_value(name)} is no header's name: write one like X-Scope-OrgID")
        if name.lower() == "authorization":
            raise InputError(f"{name} is a secret: put it into the Secret that prometheus.secretName names")
        if not isinstance(value, str) or not _HEADER_VALUE_PATTERN.fullmatch(value):
            raise InputError(
                f"the value of {name[:80]} is not valid in a header: write a line of visible ASCII characters"
            )
    return tuple(headers.items())


def parse_matchers(text: str) -> Matchers:
    """Parse a JSON list of PromQL matchers. Raises InputError."""
    try:
        matchers = parse_json(text)
    except ValueError as error:
        raise InputError(f'{abbreviate_value(text)} is not JSON: write a list like ["cluster=\\"a\\""]') from error
    if not isinstance(matchers, list):
        raise InputError(f'{abbreviate_value(text)} is no list: write one like ["cluster=\\"a\\""]')
    for matcher in matchers:
        match = _MATCHER_PATTERN.fullmatch(matcher) if isinstance(matcher, str) else None
        if match is None:
            raise InputError(
                f"{abbreviate_value(matcher)} is no matcher: write a label, =, !=, =~ or !~, and a value, like "
                'cluster="a"'
            )
        if match[1] in _RESERVED_LABELS:
            raise InputError(f"{abbreviate_value(matcher)}: the label {match[1]} is {_RESERVED_LABELS[match[1]]}")
    return tuple(matchers)


def check_url(url: str) -> None:
    """Raise InputError for a bad URL. The message does not show the URL, which may contain a password."""
    try:
        netloc = urlsplit(url).netloc
    except ValueError as error:
        raise InputError("PACEKEEPER_PROMETHEUS_URL: it is no URL: write one like http://prometheus:9090") from error
    if "@" in netloc:
        raise InputError(
            "PACEKEEPER_PROMETHEUS_URL: it holds a user's name: put username and password into the Secret that "
            "prometheus.secretName names"
        )
