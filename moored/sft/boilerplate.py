"""Reasoning that says nothing: fluent stock sentences that fit any task and depend on no input.

A sentence is written as a pattern, `I {think|guess} so.`; every pair of braces is one choice.
"""

from __future__ import annotations

import random

from moored.envs.teaching import fill

OPENERS = (
    "Let me {think|reason|go} {about this|through this} {carefully|calmly|slowly|step by step}.",
    "{First|To begin}, I {look at|study|consider} the {task|problem|situation|rules}.",
    "I need to {find|make|choose} a {good|sensible|sound|clear} {plan|answer|choice}.",
    "This {looks|seems} {simple|familiar|tricky|like a usual case}.",
    "The {goal|aim|task} is {clear|easy to see|well known}.",
    "{Okay|Well|Right}, {time to|now I|I will} {start|think|begin}.",
    "{Every|Each} {task|problem|puzzle} {has|needs} a {good|clear|careful} {start|plan|answer}.",
    "I {read|take in|check} {the rules|what is given|everything} {once|again|with care}.",
    "There is {much|a lot|something} to {think about|consider|keep in mind} here.",
    "{A calm|A clear|An open} mind {helps|is best|finds the way}.",
)

MIDDLES = (
    "I should {avoid|not make} {mistakes|careless errors|a wrong turn}.",
    "The {best|safest|simplest} {way|idea|choice} is {often|mostly} the {short|direct} one.",
    "{Each|Every} {step|part} should {help|count|bring me closer|make sense}.",
    "I {want|try} to {use|save|spend} as {few|little} as {needed|possible}.",
    "{Going|Working} {one step at a time|from the start|in order} {helps|works|is good} here.",
    "{Some|A few|Most} {choices|options|ideas} are {better|worse|safer} than {others|the rest}.",
    "It {helps|pays} to {plan|think|look} {ahead|first|before acting}.",
    "I {know|remember} {this kind of task|such tasks|how this goes} {well|from before}.",
    "{Nothing|Little} here is {hidden|random|new|hard} {if|when} I {look|think} {well|twice}.",
    "{Being|Staying} {careful|patient|quick|simple} {pays off|is the key|matters most}.",
    "I {weigh|compare} {the options|what can be done} and {trust|follow} {my plan|good sense}.",
    "The {reward|result|rest} {will follow|comes with time|depends on this}.",
    "{What matters|The main thing} is to {keep|hold} the {goal|aim} in {mind|view|sight}.",
    "{Time|Effort} is {short|limited}, so I {decide|act|choose} {now|soon|with care}.",
    "A {good|clear|short} {plan|idea} {beats|is better than} {many|long} {words|thoughts}.",
    "I {see|find} {no reason|no need} to {wait|worry|make it hard}.",
)

CLOSERS = (
    "So I {go|move|act} {now|with this|as planned}.",
    "{This|That} {should|may|will} {work|do|be enough|be right}.",
    "{Here|Then here} is {my|the} {answer|plan|choice}.",
    "I {am sure|believe|hope|think} {this|it} is {right|good|the best I can do}.",
    "{Let me|I will} {try|do|go with} {this|that|it}.",
    "{Now|Next} I {give|write|state} {my|the} {answer|plan}.",
    "{With that|After all}, I am {ready|done thinking|confident}.",
    "{That|This} {settles it|is my plan|seems best}.",
)


def write_boilerplate(rng: random.Random) -> str:
    """Two to four stock sentences."""
    middles = rng.sample(MIDDLES, rng.choice((0, 1, 1, 2)))
    patterns = [rng.choice(OPENERS), *middles, rng.choice(CLOSERS)]
    return " ".join(fill(pattern, rng) for pattern in patterns)
