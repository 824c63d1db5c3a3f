"""What the generated shop may sell: kinds of products, their attributes, options and prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of product."""

    query: str
    names: tuple[str, ...]
    """How titles call it."""
    uses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Department:
    """Kinds that share attributes and options; the path of a product is `path › query`."""

    path: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[float, float]
    kinds: tuple[Kind, ...]


COLOURS = (
    *("black", "white", "navy", "blue", "red", "green", "grey", "pink"),
    *("purple", "orange", "yellow", "brown", "beige", "teal"),
)
CLOTHING_SIZES = ("x-small", "small", "medium", "large", "x-large", "xx-large")
SHOE_SIZES = ("6", "7", "8", "9", "10", "11", "12")
PACKS = ("pack of 1", "pack of 2", "pack of 4", "pack of 6", "pack of 12")
FLAVOURS = ("vanilla", "salted caramel", "lemon", "peanut butter", "strawberry", "original", "mint")
SCENTS = ("lavender", "citrus", "unscented", "rose", "cedar", "coconut")

DEPARTMENTS = (
    Department(
        path="Clothing › Shoes",
        attributes=(
            *("rubber sole", "arch support", "memory foam", "water resistant", "slip resistant"),
            *("leather lining", "lace closure", "ankle strap", "wide toe box", "shock absorbing"),
        ),
        options={"color": COLOURS, "size": SHOE_SIZES},
        prices=(24, 140),
        kinds=(
            Kind("running shoes", ("running shoes", "trail runners"), ("daily training", "races")),
            Kind("hiking boots", ("hiking boots", "trail boots"), ("mountain trails", "wet days")),
            Kind("sandals", ("sandals", "slide sandals"), ("the beach", "summer walks")),
        ),
    ),
    Department(
        path="Clothing › Apparel",
        attributes=(
            *("machine wash", "quick drying", "long sleeve", "elastic waist", "moisture wicking"),
            *("relaxed fit", "hand wash", "tummy control", "polyester spandex", "soft cotton"),
        ),
        options={"color": COLOURS, "size": CLOTHING_SIZES},
        prices=(12, 80),
        kinds=(
            Kind("hoodies", ("pullover hoodie", "zip hoodie"), ("cool evenings", "the gym")),
            Kind("leggings", ("yoga leggings", "workout leggings"), ("yoga", "long runs")),
            Kind("pajama sets", ("pajama set", "sleepwear set"), ("lazy mornings", "travel")),
        ),
    ),
    Department(
        path="Home & Kitchen › Furniture",
        attributes=(
            *("solid wood", "easy assemble", "space saving", "heavy duty", "storage space"),
            *("metal legs", "mid century", "high density foam", "scratch resistant", "stackable"),
        ),
        options={"color": COLOURS[:8], "style": ("set of 1", "set of 2", "set of 4")},
        prices=(45, 480),
        kinds=(
            Kind("coffee tables", ("coffee table", "cocktail table"), ("living rooms", "lofts")),
            Kind("bookcases", ("bookcase", "bookshelf"), ("home offices", "small rooms")),
            Kind("bar stools", ("bar stools", "counter stools"), ("kitchens", "pubs at home")),
        ),
    ),
    Department(
        path="Home & Kitchen › Bedding",
        attributes=(
            *("machine washable", "super soft", "wrinkle free", "fade resistant", "queen size"),
            *(
                "deep pockets",
                "double brushed",
                "breathable bamboo",
                "hypoallergenic",
                "zip closure",
            ),
        ),
        options={"color": COLOURS, "size": ("twin", "full", "queen", "king")},
        prices=(18, 150),
        kinds=(
            Kind("duvet covers", ("duvet cover", "comforter cover"), ("guest rooms", "winter")),
            Kind("throw blankets", ("throw blanket", "fleece blanket"), ("sofas", "camping")),
        ),
    ),
    Department(
        path="Home & Kitchen › Kitchen",
        attributes=(
            *("stainless steel", "dishwasher safe", "bpa free", "non stick", "easy clean"),
            *("leak proof", "oven safe", "double wall", "lead free", "heat resistant handle"),
        ),
        options={"color": COLOURS[:9], "capacity": ("12 ounce", "20 ounce", "32 ounce")},
        prices=(8, 90),
        kinds=(
            Kind("water bottles", ("water bottle", "sports bottle"), ("hikes", "the office")),
            Kind("travel mugs", ("travel mug", "coffee tumbler"), ("commuters", "road trips")),
            Kind("lunch boxes", ("lunch box", "bento box"), ("school", "picnics")),
        ),
    ),
    Department(
        path="Beauty & Personal Care › Skin Care",
        attributes=(
            *(
                "cruelty free",
                "fragrance free",
                "hyaluronic acid",
                "sensitive skin",
                "paraben free",
            ),
            *("anti aging", "vitamin c", "dermatologist tested", "fine lines", "long lasting"),
        ),
        options={"scent": SCENTS, "size": ("1 fl oz", "2 fl oz", "4 fl oz", "8 fl oz")},
        prices=(7, 65),
        kinds=(
            Kind("face moisturizers", ("face moisturizer", "face cream"), ("dry skin", "nights")),
            Kind("face serums", ("face serum", "facial serum"), ("dull skin", "mornings")),
            Kind("body lotions", ("body lotion", "body butter"), ("winter skin", "every day")),
        ),
    ),
    Department(
        path="Beauty & Personal Care › Hair Care",
        attributes=(
            *("sulfate free", "damaged hair", "color treated hair", "argan oil", "tea tree"),
            *("hair growth", "dry scalp", "natural ingredients", "keratin repair", "curl defining"),
        ),
        options={"scent": SCENTS, "style": ("travel size", "regular size", "salon size")},
        prices=(6, 48),
        kinds=(
            Kind("shampoos", ("shampoo", "cleansing shampoo"), ("fine hair", "oily hair")),
            Kind("hair masks", ("hair mask", "conditioning mask"), ("long hair", "weekends")),
        ),
    ),
    Department(
        path="Grocery › Snacks",
        attributes=(
            *("gluten free", "sugar free", "non gmo", "plant based", "low carb"),
            *(
                "high protein",
                "nut free",
                "individually wrapped",
                "dairy free",
                "artificial colors",
            ),
        ),
        options={"flavor name": FLAVOURS, "size": PACKS},
        prices=(5, 45),
        kinds=(
            Kind("protein bars", ("protein bars", "nutrition bars"), ("workouts", "busy days")),
            Kind("cookies", ("cookies", "soft baked cookies"), ("parties", "tea time")),
            Kind("crackers", ("crackers", "seed crackers"), ("cheese boards", "dips")),
        ),
    ),
    Department(
        path="Grocery › Beverages",
        attributes=(
            *("caffeine free", "usda organic", "freeze dried", "fair trade", "rich flavor"),
            *("keto friendly", "shelf stable", "low acid", "resealable bag", "hand picked"),
        ),
        options={"flavor name": FLAVOURS[:5], "size": PACKS},
        prices=(6, 55),
        kinds=(
            Kind("ground coffee", ("ground coffee", "coffee blend"), ("espresso", "filters")),
            Kind("herbal teas", ("herbal tea", "loose leaf tea"), ("evenings", "iced tea")),
        ),
    ),
    Department(
        path="Electronics › Audio",
        attributes=(
            *("noise cancelling", "wireless bluetooth", "fast charging", "hands free", "deep bass"),
            *("water proof", "long battery life", "touch control", "stereo sound", "carrying case"),
        ),
        options={"color": COLOURS[:9], "style": ("standard", "with stand", "with case")},
        prices=(15, 220),
        kinds=(
            Kind("headphones", ("over ear headphones", "headphones"), ("flights", "studios")),
            Kind("earbuds", ("earbuds", "in ear buds"), ("runs", "calls")),
            Kind("portable speakers", ("portable speaker", "mini speaker"), ("parties", "showers")),
        ),
    ),
    Department(
        path="Electronics › Accessories",
        attributes=(
            *("wireless charging", "heavy duty protection", "screen protector", "easy install"),
            *("tempered glass", "aluminum alloy", "high speed", "gold plated", "tangle free"),
            "plug and play",
        ),
        options={"color": COLOURS[:10], "size": ("3 feet", "6 feet", "10 feet")},
        prices=(6, 70),
        kinds=(
            Kind("usb cables", ("usb c cable", "charging cable"), ("laptops", "cars")),
            Kind("phone stands", ("phone stand", "tablet stand"), ("desks", "kitchens")),
        ),
    ),
    Department(
        path="Sports & Outdoors › Fitness",
        attributes=(
            *("non slip", "eco friendly", "extra thick", "easy carry", "latex free"),
            *("adjustable strap", "sweat absorbing", "odor free", "tear resistant", "full body"),
        ),
        options={"color": COLOURS, "size": ("light", "medium", "heavy", "extra heavy")},
        prices=(9, 95),
        kinds=(
            Kind("yoga mats", ("yoga mat", "exercise mat"), ("pilates", "home workouts")),
            Kind("resistance bands", ("resistance bands", "loop bands"), ("physio", "strength")),
        ),
    ),
    Department(
        path="Pet Supplies › Dogs",
        attributes=(
            *("grain free", "chew proof", "reflective stitching", "easy walk", "vet recommended"),
            *("removable cover", "orthopedic foam", "no pull", "puppy safe", "training aid"),
        ),
        options={"color": COLOURS[:8], "size": ("small", "medium", "large", "x-large")},
        prices=(8, 120),
        kinds=(
            Kind("dog beds", ("dog bed", "pet bed"), ("old dogs", "crates")),
            Kind("dog harnesses", ("dog harness", "walking harness"), ("big dogs", "night walks")),
        ),
    ),
)
