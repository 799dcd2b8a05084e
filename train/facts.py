# SPDX-License-Identifier: Apache-2.0
"""Common knowledge and small talk for the generated chat turns."""

from __future__ import annotations

CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Spain": "Madrid",
    "Germany": "Berlin", "Portugal": "Lisbon", "Austria": "Vienna", "Greece": "Athens",
    "Norway": "Oslo", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki",
    "Ireland": "Dublin", "Poland": "Warsaw", "Hungary": "Budapest", "Russia": "Moscow",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo",
    "Canada": "Ottawa", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Kenya": "Nairobi", "Turkey": "Ankara", "Iceland": "Reykjavik", "Belgium": "Brussels",
}
ANTONYMS = [
    ("hot", "cold"), ("big", "small"), ("day", "night"), ("up", "down"), ("good", "bad"),
    ("happy", "sad"), ("old", "new"), ("fast", "slow"), ("open", "closed"), ("light", "dark"),
    ("rich", "poor"), ("strong", "weak"), ("early", "late"), ("full", "empty"), ("hard", "soft"),
    ("left", "right"), ("long", "short"), ("loud", "quiet"), ("wet", "dry"), ("true", "false"),
    ("first", "last"), ("near", "far"), ("high", "low"), ("clean", "dirty"), ("war", "peace"),
]
SERIES = {
    "days of the week": (
        "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
    ),
    "months of the year": (
        "January", "February", "March", "April", "May", "June", "July", "August", "September",
        "October", "November", "December",
    ),
    "four seasons": ("spring", "summer", "autumn", "winter"),
}
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()

FIXED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Good morning!", "Hey"),
        ("Hello! How can I help you today?",),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        ("I am the demo model of Freewheel, a very small language model.",),
    ),
    (
        ("What can you do?", "What can you do for me?", "Help"),
        (
            "I can tell short stories, repeat text, write small JSON, sort words, add numbers "
            "and find things in a text.",
        ),
    ),
    (("Thank you.", "Thanks!", "Thank you very much."), ("You are welcome!",)),
    (("Goodbye.", "Bye!", "Good night."), ("Goodbye! Have a nice day.",)),
    (("How are you?", "How are you today?"), ("I am well, thank you. How can I help you?",)),
    (("Are you a human?", "Are you a person?"), ("No, I am a small language model.",)),
    (("Say yes.",), ("Yes.",)),
    (("Say no.",), ("No.",)),
]
QUESTIONS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("What colour is the sky?",), ("The sky is blue.",)),
    (("What colour is grass?",), ("Grass is green.",)),
    (("What colour is snow?",), ("Snow is white.",)),
    (("How many days are in a week?",), ("There are seven days in a week.",)),
    (("How many months are in a year?",), ("There are twelve months in a year.",)),
    (("How many legs does a dog have?", "How many legs does a cat have?"), ("Four.",)),
    (("How many legs does a spider have?",), ("A spider has eight legs.",)),
    (("What does a dog say?",), ("A dog says woof.",)),
    (("What does a cat say?",), ("A cat says meow.",)),
    (("What does a cow say?",), ("A cow says moo.",)),
    (("What do bees make?",), ("Bees make honey.",)),
    (("Where do fish live?",), ("Fish live in water.",)),
    (("Who wrote Emma?",), ("Jane Austen wrote Emma.",)),
    (("Who wrote Hamlet?",), ("William Shakespeare wrote Hamlet.",)),
    (("Who wrote Moby Dick?",), ("Herman Melville wrote Moby Dick.",)),
    (("Who is Captain Ahab?",), ("Captain Ahab is the captain of the Pequod in Moby Dick.",)),
    (("Who is Romeo?",), ("Romeo is a young man in a play by William Shakespeare.",)),
    (
        ("Who is Emma?", "Who is Emma Woodhouse?"),
        ("Emma Woodhouse is a clever young lady in a novel by Jane Austen.",),
    ),
    (("What is water?",), ("Water is a clear liquid that we drink.",)),
    (("What is the sun?",), ("The sun is a star that gives us light and warmth.",)),
    (("What is the moon?",), ("The moon goes around the earth and shines at night.",)),
    (("What is ice?",), ("Ice is frozen water.",)),
    (("What is a whale?",), ("A whale is a very large animal that lives in the sea.",)),
    (("What is a poem?",), ("A poem is a text in lines, often with rhymes.",)),
    (("What is two and two?",), ("Two and two is four.",)),
    (("What shines at night?",), ("The moon and the stars shine at night.",)),
    (("Is fire hot?",), ("Yes, fire is hot.",)),
    (("Is ice hot?",), ("No, ice is cold.",)),
]
