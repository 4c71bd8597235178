"""How models write what they think before they answer: one file for each format."""
