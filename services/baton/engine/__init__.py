"""The engine: turns step plans into tokens with torch."""
