"""What sentence-transformers makes of texts; prints JSON: a list of vectors or of scores a model.

argv: a JSON object with "texts", "query", and folders by name under "embed" and "score".
"""

import json
import sys

from sentence_transformers import CrossEncoder, SentenceTransformer

asked = json.loads(sys.argv[1])
texts = asked["texts"]
found = {}
for name, folder in asked["embed"].items():
    found[name] = SentenceTransformer(folder, device="cpu").encode(texts, batch_size=4).tolist()
for name, folder in asked["score"].items():
    model = CrossEncoder(folder, device="cpu")
    model.model.config.pad_token_id = 0
    pairs = [(asked["query"], text) for text in texts]
    found[name] = [[float(score)] for score in model.predict(pairs, batch_size=4)]
print(json.dumps(found))
