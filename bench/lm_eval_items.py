"""Fifty multiple-choice items, and the task of lm-evaluation-harness that asks them: no data set is
downloaded.
"""

import json
from pathlib import Path

TASK = "pdcluster_choices"

_SETS = {
    "The capital of {} is": {
        "France": "Paris",
        "Italy": "Rome",
        "Spain": "Madrid",
        "Germany": "Berlin",
        "Japan": "Tokyo",
        "China": "Beijing",
        "Russia": "Moscow",
        "Egypt": "Cairo",
        "Greece": "Athens",
        "Portugal": "Lisbon",
        "Austria": "Vienna",
        "Poland": "Warsaw",
        "Ireland": "Dublin",
        "Norway": "Oslo",
        "Sweden": "Stockholm",
        "Cuba": "Havana",
        "Peru": "Lima",
    },
    "The opposite of {} is": {
        "hot": "cold",
        "big": "small",
        "fast": "slow",
        "light": "dark",
        "old": "young",
        "rich": "poor",
        "happy": "sad",
        "early": "late",
        "high": "low",
        "hard": "soft",
        "full": "empty",
        "open": "closed",
        "strong": "weak",
        "wet": "dry",
        "near": "far",
        "clean": "dirty",
        "loud": "quiet",
    },
    "The young of a {} is called a": {
        "dog": "puppy",
        "cat": "kitten",
        "cow": "calf",
        "sheep": "lamb",
        "horse": "foal",
        "duck": "duckling",
        "lion": "cub",
        "deer": "fawn",
        "frog": "tadpole",
        "goat": "kid",
        "pig": "piglet",
        "swan": "cygnet",
        "goose": "gosling",
        "butterfly": "caterpillar",
        "hen": "chick",
        "kangaroo": "joey",
    },
}


def items() -> list[dict[str, object]]:
    """Each with four choices: the answer, and three answers of its neighbours."""
    made: list[dict[str, object]] = []
    for question, answers in _SETS.items():
        words = list(answers.values())
        for place, (subject, answer) in enumerate(answers.items()):
            others = [words[(place + step) % len(words)] for step in (1, 4, 7)]
            right = len(made) % 4
            made.append(
                {
                    "question": question.format(subject),
                    "choices": [*others[:right], answer, *others[right:]],
                    "answer": right,
                }
            )
    return made


def write_task(folder: Path) -> None:
    """The items and the task's file, for lm-eval's --include_path."""
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()))
    (folder / f"{TASK}.yaml").write_text(
        f"task: {TASK}\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{answer}}"\n'
        "metric_list:\n"
        "  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
        "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n"
        "metadata: {version: 1}\n"
    )
