"""Dialogues: messages to prompts, replies to text, episodes turn by turn."""
