"""WebShop: search for a product, choose its options and buy what an instruction asks for."""

from moored.envs.webshop.products import Goal, Product, Review
from moored.envs.webshop.score import PurchaseScore, purchase_score

__all__ = ["Goal", "Product", "PurchaseScore", "Review", "purchase_score"]
