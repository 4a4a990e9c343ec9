"""What an input template must be."""

from bapo_openrlhf.errors import ConfigError, one_line

PLACE = "{}"  # of the prompt


def check_template(flag: str, template: str | None) -> None:
    """Check that an input template has {} once. OpenRLHF leaves out one without it, or fails at the first row."""
    if template is None:
        return
    rule = "it must have {} in place of the prompt, once, and {{ and }} for braces of its own"
    if PLACE not in template:
        raise ConfigError(f"{flag} is {template!r}; {rule}")
    try:
        filled = template.format("THE PROMPT")
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{flag} is {template!r}, which cannot be filled ({one_line(error)}); {rule}") from None
    if "THE PROMPT" not in filled:
        raise ConfigError(f"{flag} is {template!r}, which is {filled!r} with every prompt; {rule}")
