"""The engine: turns step plans into tokens with torch; knows no RPC and no request lifecycle."""
