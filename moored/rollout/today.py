"""The date in prompts: templates that write today's write the same one every day.

So a run that goes on tomorrow has the prompts that it began with.
"""

from __future__ import annotations

from datetime import date

TODAY = date(2024, 7, 26)
"""The date that Llama's template has where it is told none."""
DIRECTIVES = ("%-d", "%d", "%b", "%B", "%-m", "%m", "%Y", "%y", "%A", "%a", "%F", "%H", "%M", "%S")


def with_fixed_date(template: str) -> str:
    """A chat template whose `strftime_now` knows one day only."""
    if "strftime_now" not in template:
        return template
    filled = "".join(f" | replace('{code}', '{TODAY.strftime(code)}')" for code in DIRECTIVES)
    # As a variable it would be text: only a macro of the template can take its place.
    return (
        f"{{%- macro strftime_now(format) -%}}{{{{ format{filled} }}}}{{%- endmacro -%}}{template}"
    )
