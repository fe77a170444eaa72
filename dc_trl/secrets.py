"""Hides tokens, keys and passwords in settings, command lines and messages."""

import re
from collections.abc import Sequence


HIDDEN = "(hidden)"

# Names of secrets in fields, dicts and options: hub_token, api-key, clientSecret, Authorization.
_NAME = re.compile(r"(token|key|secret|passw(or)?d|[_-]pwd|credentials?|authorization|auth|cookie)$", re.IGNORECASE)
# Values that are secrets by their form, and the parts of a URL that may hold secrets.
_FORMS = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_|wandb_v1_)[\w-]{16,}|(?i:\b(bearer|authorization:\s*\w+)\s+\S+)"
    r"|(?i:(?<=token=)|(?<=key=)|(?<=secret=)|(?<=password=))\S+"
)
_URL_PARTS = re.compile(r"(?<=://)[^\s/?#@]*@|(?<=[?&])[^\s=&#]+=[^\s&#]*")
_JSON_MEMBER = re.compile(rf'("[^"]*{_NAME.pattern.removesuffix("$")}"\s*:\s*)"[^"]*"', re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Return whether a value of this name is a secret."""
    return _NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """Return a text without what looks like a token, and with URLs without user and query."""
    text = _JSON_MEMBER.sub(rf'\1"{HIDDEN}"', text)
    return _URL_PARTS.sub("", _FORMS.sub(HIDDEN, text))


def hide_in_options(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with "(hidden)" for the values of options such as `--api-key X Y`."""
    shown, hiding = [], False
    for word in words:
        if word.startswith("--") or (word.startswith("-") and not hiding):  # a key may begin with a dash
            name, equals, _ = word.partition("=")
            secret = is_secret_name(name)
            hiding = secret and not equals
            shown.append(f"{name}={HIDDEN}" if secret and equals else without_secrets(word))
        else:
            shown.append(HIDDEN if hiding else without_secrets(word))
    return shown


def secrets_in_options(words: Sequence[str]) -> list[str]:
    """Return the values that `hide_in_options` hides as a whole."""
    return [
        word.removeprefix(seen.removesuffix(HIDDEN))
        for word, seen in zip(words, hide_in_options(words), strict=True)
        if seen.endswith(HIDDEN) and word != seen
    ]
