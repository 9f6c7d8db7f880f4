"""The models that examples and tutorials teach, as their sources have them, with unequal tables."""

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.docs.tutorials import read
from tests.paths import ROOT

TINY = 5
# Rows of the tables of each model, over and over.
_ROWS = (200, TINY, 80, 310, 40)
# In place of a program's own few features, which only some plans could bring into another order.
_FEATURES = ["user", "item", "shop", "city", "day"]
_DENSE_FEATURES = 13


def taught_models() -> dict[str, str]:
    """Returns the program of each taught model with an embedding collection, by its name."""
    programs = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted((ROOT / "examples").rglob("*.py"))
    }
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        for name, text in read(page).files.items():
            programs[f"{page.stem}/{name}"] = text
    return {name: text for name, text in programs.items() if any(_models_of(text))}


def make_model(program: str) -> nn.Module:
    """Makes a program's model. Tables have different sizes and weights, whatever the program says.

    Nothing of the program runs but its imports, constants, functions and classes.
    """
    (model,) = _models_of(program)
    tree = ast.parse(program)
    tree.body = [statement for statement in tree.body if _only_defines(statement)]
    namespace: dict[str, Any] = {"__name__": "taught"}
    exec(compile(tree, "taught", "exec"), namespace)
    namespace["EmbeddingBagConfig"] = _UnequalTables()
    if "FEATURES" in namespace:
        namespace["FEATURES"] = _FEATURES
    torch.manual_seed(0)
    made = namespace[model.name](*_ARGUMENTS.get(model.name, ())).eval()
    with torch.no_grad():
        for number, bag in enumerate(collection_of(made)[1].embedding_bags.values()):
            bag.weight.uniform_(number - 0.5, number + 0.5)
    assert isinstance(made, nn.Module)
    return made


def collection_of(model: nn.Module) -> tuple[str, EmbeddingBagCollection]:
    """Returns the embedding collection of a model, with its path."""
    ((path, collection),) = (
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection)
    )
    return path, collection


def make_arguments(model: nn.Module, program: str, seed: int, samples: int = 7) -> list[Any]:
    """Draws what the model's forward takes, by the names that its program gives it."""
    generator = torch.Generator().manual_seed(seed)
    configs = collection_of(model)[1].embedding_bag_configs()
    lengths = torch.randint(3, (len(configs), samples), generator=generator, dtype=torch.int32)
    ids = KeyedJaggedTensor(
        keys=[config.feature_names[0] for config in configs],
        values=torch.cat(
            [
                torch.randint(config.num_embeddings, (int(of_table.sum()),), generator=generator)
                for config, of_table in zip(configs, lengths, strict=True)
            ]
        ),
        lengths=lengths.flatten(),
    )
    clicked = torch.randint(2, (samples,), generator=generator).float()
    dense = torch.rand(samples, _DENSE_FEATURES, generator=generator)
    possible = {"ids": ids, "clicked": clicked, "batch": Batch(dense, ids, clicked)}
    for layer in model.modules():
        if isinstance(layer, nn.Linear):  # it takes them beside all embeddings
            columns = layer.in_features - sum(config.embedding_dim for config in configs)
            possible["dense"] = torch.rand(samples, max(columns, 0), generator=generator)
            break
    (model_class,) = _models_of(program)
    (forward,) = (
        each
        for each in model_class.body
        if isinstance(each, ast.FunctionDef) and each.name == "forward"
    )
    return [possible[argument.arg] for argument in forward.args.args[1:]]


# What a model is made with, where its program has it from its caller: rows and columns of tables.
_ARGUMENTS = {"DlrmOnBatches": ([0] * 26, 8)}


class _UnequalTables:
    """Stands for EmbeddingBagConfig, and gives each table another number of rows."""

    def __init__(self) -> None:
        self._made = 0

    def __call__(self, **arguments: Any) -> EmbeddingBagConfig:
        rows = _ROWS[self._made % len(_ROWS)]
        self._made += 1
        return EmbeddingBagConfig(**{**arguments, "num_embeddings": rows})


def _models_of(program: str) -> Iterator[ast.ClassDef]:
    """Yields the classes that make an embedding collection and hand its output on."""
    for statement in ast.parse(program).body:
        if isinstance(statement, ast.ClassDef):
            names = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
            defined = {each.name for each in statement.body if isinstance(each, ast.FunctionDef)}
            if "EmbeddingBagCollection" in names and "forward" in defined:
                yield statement


def _only_defines(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        targets = [each for target in statement.targets for each in ast.walk(target)]
        return all(each.id.isupper() for each in targets if isinstance(each, ast.Name))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    return isinstance(statement, kinds)
