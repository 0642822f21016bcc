"""What the model is asked: ordinary questions, text with emoji and Chinese, Japanese and Korean characters, code, and
requests to repeat, where n-grams find something."""

NEW = 64
QUESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "Write a haiku about autumn rain.",
    "List the planets of the solar system, one a line.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Translate into French: Where is the train station?",
    "Write a Python function that adds two numbers.",
    "Repeat exactly: 日本語のテキスト 中文文本 한국어 텍스트",
    "Write the numbers from 1 to 30, separated by commas.",
    "Repeat exactly: 😀 🎉 👩‍🚀 🏳️‍🌈 naïve café",
    'Answer with JSON only: {"name": …, "age": …} for Ada, who is 36.',
    "What is the capital of France?",
    "Count down from 20 to 1.",
    "Give me three synonyms of happy.",
    "Write a short poem about a cat named 小猫.",
    "What is 17 times 24? Show your work.",
    "Repeat the word echo twenty times.",
    "Write an email that asks for a day off.",
    "Correct the grammar: he go to school yesterday",
    "Write a for loop in Python that prints the even numbers below 20.",
    "Why do cats purr? 🐱",
)
