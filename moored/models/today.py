"""The date in prompts: templates that write today's write the same one every day.

So a run that goes on tomorrow has the prompts that it began with.
"""

from __future__ import annotations

from datetime import date

TODAY = date(2024, 7, 26)
"""The date that Llama's template has where it is told none."""
DIRECTIVES = (
    *(f"%-{letter}" for letter in "dHIjmMSy"),
    *(f"%{letter}" for letter in "aAbBcdDeFGHIjmMpRSTuUVwWxXyYzZ"),
    "%%",
)


def with_fixed_date(template: str) -> str:
    """A chat template whose `strftime_now` knows one day only."""
    if "strftime_now" not in template:
        return template
    filled = "".join(f" | replace('{code}', '{TODAY.strftime(code)}')" for code in DIRECTIVES)
    # As a variable it would be text: only a macro of the template can take its place. White space
    # that the template begins with stays: of a line end after a block, one is left out.
    return (
        f"{{%- macro strftime_now(format) -%}}{{{{ format{filled} }}}}{{%- endmacro %}}\n{template}"
    )
