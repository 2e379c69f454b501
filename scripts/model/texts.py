"""Prose the bundled model can recite: about Baton, stories, small talk.

Every question list maps to one fixed text, so that greedy decoding has one right answer.
"""

WHO = (
    "I am the demo model that comes with Baton: a small Llama of about three million parameters, "
    "trained on a CPU. I know capitals, small sums, JSON records, greetings in many languages, "
    "emoji and a few stories."
)
HELP = (
    "You can ask me for the capital of a country, a small sum, a JSON record, a greeting in "
    "another language, an emoji, a flag, a list such as the planets, or a story. "
    'Try: "Tell me a long story."'
)
UNKNOWN = (
    "I do not know that. I am a very small model: ask me about capitals, small sums, "
    "JSON records, greetings, emoji or a story."
)
BEYOND = (
    "That is beyond me: I add up to 99 + 99, subtract up to 20, multiply up to 12 × 12, and "
    "divide where nothing is left over."
)
BY_ZERO = "Nothing can be divided by zero."
WELCOME = "You are welcome!"
NO_NAME = "You have not told me your name."

STORY = (
    "Once upon a time there was a small baton who loved to run. Every morning four friends met at "
    "the track, and every morning the baton went from hand to hand: first the fast one, then the "
    "strong one, then the calm one, then the brave one. None of them ran the whole way alone, and "
    "none of them ever let the baton fall. When the last one crossed the line, all four cheered, "
    "because the race belonged to all of them. The end."
)
LONG_STORY = (
    "Long ago, in a valley between two mountains, there was a library with a thousand doors. "
    "Behind the first door sat a reader, who turned every question into small wooden tiles. "
    "Behind the second door lived a scholar, who looked at all the tiles at once and filled a "
    "notebook with everything they meant.\n\n"
    "One winter the scholar grew tired, for the people who asked also wanted long answers, and "
    "each answer had to be written one tile at a time. So the scholar tied the notebook to a "
    "baton and gave it to a young runner. The runner carried it through the snow to a writer on "
    "the other side of the valley.\n\n"
    "The writer opened the notebook, read the last page, and began to lay down tiles: one, then "
    "the next, then the next. A singer stood beside the table and sang every tile as soon as it "
    "was placed, so that nobody had to wait for the end.\n\n"
    "One night a storm took the bridge, and the runner did not come. But the gatekeeper had "
    "written down every tile that was ever sung, and so another writer took up the song at the "
    "very next word. Nobody in the valley noticed, and the song went on until the morning. "
    "The end."
)
SECOND_STORY = (
    "A young lighthouse keeper found a letter in a bottle. It said: pass this on. So she copied "
    "the letter, put it into a new bottle, and gave it back to the sea. Years later a sailor came "
    "to the island with the same words in his hand. The letter had gone around the whole world, "
    "from one friend to the next, and not a single word was missing. The end."
)
POEM = (
    "The first one reads, the next one thinks,\n"
    "the third one writes, and no one blinks;\n"
    "a word, a word, and then one more,\n"
    "the baton runs from door to door."
)
HAIKU = "Hand to hand it goes,\nwarm from the one who ran first:\nthe race is not mine."
JOKE = "Why did the token cross the network? Because its cache was on the other side. 😄"

#: (questions, answer): each question on its own is enough to get the answer.
ABOUT: list[tuple[tuple[str, ...], str]] = [
    (("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.",
      "Are you an AI?", "What model are you?", "Which model is this?", "Who am I talking to?"),
     WHO),
    (("What is your name?", "What's your name?", "What are you called?", "Do you have a name?"),
     "My name is Baton."),
    (("What can you do?", "Help", "Help me.", "What do you know?", "What can I ask you?",
      "How can you help me?", "What should I ask?"), HELP),
    (("What is Baton?", "Tell me about Baton.", "What does Baton do?", "Explain Baton.",
      "Describe Baton.", "What is this?"),
     "Baton serves large language models with every stage in its own pool. Prefill runs its leg, "
     "hands the KV cache over like a baton, and decode runs on."),
    (("How do you work?", "How does Baton work?", "Explain how you work.",
      "How does this work?", "What are the five pools?", "Which pools are there?"),
     "Five pools work like a relay team. The router takes the request and follows it to the end. "
     "The tokenizer turns text into tokens. Prefill reads the whole prompt and fills blocks of "
     "the KV cache. Decode takes those blocks over, like a baton, and makes one token after the "
     "other. The detokenizer turns the tokens back into text."),
    (("What does the router do?", "What is the router?", "Explain the router."),
     "The router takes each request, picks the workers, and keeps a log of every token, so that "
     "a request can go on when a worker dies."),
    (("What does the tokenizer do?", "What is the tokenizer?", "Explain the tokenizer.",
      "What is a tokenizer?"),
     "The tokenizer applies the chat template and turns text into token ids."),
    (("What does prefill do?", "What is prefill?", "Explain prefill.",
      "What does the prefill pool do?"),
     "Prefill reads the whole prompt at once, fills the KV cache, and samples the first token."),
    (("What does decode do?", "What is decode?", "Explain decode.",
      "What does the decode pool do?"),
     "Decode takes the KV cache from prefill and makes one token per step for many sequences."),
    (("What does the detokenizer do?", "What is the detokenizer?", "Explain the detokenizer.",
      "What is a detokenizer?"),
     "The detokenizer turns token ids back into text and never cuts a character in half."),
    (("What is a KV cache?", "What is the KV cache?", "Explain the KV cache.", "What is KV?"),
     "The KV cache holds the keys and values of every token read so far, in blocks, so that no "
     "token has to be read twice."),
    (("What is a block?", "What is a KV block?", "What are blocks?"),
     "A block is a fixed number of token positions of the KV cache."),
    (("What is a KV chunk?", "What is a handover?", "How is the KV cache handed over?",
      "How does the handover work?"),
     "Prefill packs finished blocks into sealed KV chunks. Decode fetches them, checks the seal, "
     "and only then goes on."),
    (("Why are you called Baton?", "Why is it called Baton?", "Why the name?"),
     "Because prefill hands the KV cache to decode like a runner hands over the baton."),
    (("What is a token?", "Explain tokens.", "What are tokens?"),
     "A token is a small piece of text: a word, a part of a word, or a single digit."),
    (("How big are you?", "How many parameters do you have?", "How large are you?"),
     "I have about three million parameters: very small for a language model."),
    (("Who made you?", "Who trained you?", "Where do you come from?", "Who built you?"),
     "I was trained by a script in the Baton repository, on text that the script itself wrote."),
]  # fmt: skip

SMALL_TALK: list[tuple[tuple[str, ...], str]] = [
    (("Hi", "Hello", "Hey", "Hello!", "Hi!", "Hey there", "Hi there", "Hello there",
      "Hello Baton", "Hi Baton!", "Greetings"), "Hello! How can I help you?"),
    (("Good morning", "Good morning!"), "Good morning! How can I help you?"),
    (("Good evening", "Good evening!"), "Good evening! How can I help you?"),
    (("Thanks", "Thank you", "Thanks!", "Thank you very much!", "Thanks a lot", "Thx",
      "Great, thanks", "Perfect, thank you!"), WELCOME),
    (("How are you?", "How are you doing?", "How is it going?", "How do you do?",
      "Hi, how are you?", "Hello, how are you?"),
     "I am fine, thank you. What would you like to know?"),
    (("Bye", "Goodbye", "See you", "See you later", "Bye!", "Goodbye!"),
     "Goodbye! See you next time."),
    (("Ok", "Okay", "Good", "Great", "Nice", "Cool", "Well done", "Good job"),
     "I am glad. What else would you like to know?"),
    (("Sorry", "I am sorry", "Excuse me"), "No problem!"),
    (("Test", "Testing", "This is a test", "Ping", "Are you there?", "Can you hear me?"),
     "I am here, and I am listening."),
    (("What is my name?", "Who am I?", "Do you know my name?"), NO_NAME),
]  # fmt: skip

STORIES: list[tuple[tuple[str, ...], str]] = [
    (("Tell me a story.", "Tell a story.", "Write a story.", "A story, please.",
      "Tell me a short story.", "Write me a short story.", "Can you tell me a story?",
      "Once upon a time", "I would like to hear a story.",
      "Tell me a story about yourself.", "Tell me a story about Baton.",
      "Tell me a story about a baton."), STORY),
    (("Tell me a long story.", "Write a long story.", "A long story, please.",
      "Can you tell me a long story?", "Tell me a longer story.", "Write me a long story.",
      "Tell me a very long story.", "I would like to hear a long story."), LONG_STORY),
    (("Tell me another story.", "Tell me a different story.", "Another story, please."),
     SECOND_STORY),
    (("Write a poem.", "Tell me a poem.", "A poem, please.", "Write me a poem.",
      "Write a poem about Baton.", "Can you write a poem?", "Write a short poem."), POEM),
    (("Write a haiku.", "Tell me a haiku.", "A haiku, please.", "Write me a haiku."), HAIKU),
    (("Tell me a joke.", "A joke, please.", "Make me laugh.", "Do you know a joke?",
      "Tell me something funny."), JOKE),
]  # fmt: skip

#: After a story; means nothing without one.
ANOTHER = ("Another one, please.", "Another one!", "One more, please.", "And another one?")

SYSTEM = (
    "You are a helpful assistant.",
    "You are Baton, a small and honest assistant.",
    "Answer briefly.",
    "Be friendly and concise.",
    "You are the demo model of a relay team of workers.",
    "Answer the user's question as well as you can.",
)

#: thing -> (the place of its story, a name for its hero when none is given).
THINGS: dict[str, tuple[str, str]] = {
    "robot": ("city", "Ada"),
    "kite": ("valley", "Linus"),
    "lantern": ("forest", "Grace"),
    "violin": ("village", "Clara"),
    "map": ("desert", "Alan"),
    "boat": ("harbour", "Tim"),
    "clock": ("castle", "Edsger"),
    "telescope": ("mountains", "Vera"),
    "drum": ("cave", "Barbara"),
    "bicycle": ("meadow", "Ken"),
    "key": ("library", "Radia"),
    "train": ("snow", "Margaret"),
}


def story_about(name: str, thing: str) -> str:
    """The one story about this hero and this thing."""
    place = THINGS[thing][0]
    return (
        f"Once upon a time, {name} lived in the {place}. One day {name} found an old {thing}. "
        f"It was broken, but {name} repaired it with patience. The next morning {name} took the "
        f"{thing} from the {place} to the sea, and everyone they met wanted to know more. "
        f"In the end {name} gave the {thing} to a child, who promised to pass it on. The end."
    )


def items(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


NAMES = items(
    "Ada Grace Alan Linus Edsger Barbara Donald Ken Dennis Margaret Tim Radia Clara Vera Anna "
    "Maria Sofia Emma Lena Noah Liam Omar Yusuf Aisha Mei Hiro Yuki Priya Ravi Ines Pablo Ivan "
    "Olga Nina Marta Lucas Hugo Zoe Alice Bob Carol Dave Eve Mallory Peggy Victor John Mary "
    "Peter Paul James Sarah David Laura"
)

COLOURS = items("red green blue yellow orange purple black white brown pink grey gold")

WORDS = items(
    "river stone cloud paper window garden silver morning engine bridge letter music winter "
    "summer forest ocean candle ladder mirror pocket basket button circle corner desert feather "
    "finger hammer island jacket kettle lemon market needle orange pepper planet rabbit saddle "
    "shadow spider spring street sugar table thunder ticket tunnel valley velvet wagon walnut "
    "whistle wolf yellow zebra lantern harbour copper marble meadow anchor"
)

TOPICS = items(
    "quantum physics|photosynthesis|the stock market|football rules|the French Revolution|"
    "black holes|democracy|inflation|jazz|chess openings|gardening|the Roman Empire|DNA|"
    "electric cars|yoga|the moon landing|philosophy|climate change|opera|volcanoes|algebra|"
    "vaccines|Shakespeare|Hamlet|dinosaurs|the pyramids|coffee making|taxes|the internet|"
    "gravity|Python programming|machine learning|the weather|poker|the ocean|sleep|diamonds",
    "|",
)

#: {w} a word, {t} a topic, {c} a country, {n} a name.
UNKNOWN_QUESTIONS = (
    "Who invented the {w}?", "How tall is a {w}?", "What is the price of a {w}?",
    "Explain {t}.", "Tell me about {t}.", "What is {t}?", "Why is {t} important?",
    "How does {t} work?", "Write an essay about {t}.", "What do you think about {t}?",
    "Who discovered {t}?", "When did {t} begin?", "Who is {n}?", "How old is {n}?",
    "What does {n} do?", "How do I repair a {w}?", "Where can I buy a {w}?",
    "What is the weather in {c}?", "What is the population of {c}?",
    "Who is the president of {c}?", "What is the currency of {c}?", "How big is {c}?",
    "Who won the match yesterday?", "What time is it?", "What day is it today?",
    "Write a program that sorts a {w}.", "Write code for a {w}.", "Recommend me a {w}.",
    "How do I cook a {w}?", "Why is the {w} so {w}?", "What is the meaning of {w}?",
    "What is the meaning of life?", "What is the news today?", "Is a {w} better than a {w}?",
    "Can you drive a {w}?", "{w} {w} {w}", "Translate {w} into {t}.", "Summarise {t}.",
    "What is the square root of a {w}?", "Give me advice about {t}.", "Define {w}.",
    "How far is {c} from {c}?", "Can I travel to {c} by {w}?", "Who wrote {t}?",
)  # fmt: skip
