"""Names of the scorers' dimensions in rewards, weights and metrics."""

from collections.abc import Mapping

from hyvideo.rewards.contract import declared_dimensions
from hyvideo.rewards.rewards import OVERALL, Scorer, Scores, short_names


class MetricNames:
    """Maps dimensions of scorers to names, so that no score of one scorer replaces that of another.

    A dimension keeps its name unless another scorer declares it: then it is SCORER/DIMENSION. The
    dimensions of held-out scorers are held_out/SCORER/DIMENSION.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        given: Mapping[str, float | Mapping[str, float]] | None = None,
        *,
        is_held_out: bool = False,
    ):
        """``given`` are the weights by dimension, or by scorer and dimension.

        Raises ValueError for an unknown scorer in them, and for a dimension whose scorer is not
        clear.
        """
        self.is_held_out = is_held_out
        self.labels = short_names(list(scorers))
        self.declared = {name: declared_dimensions(scorer) for name, scorer in scorers.items()}
        for name, weights in (given or {}).items():
            if name in self.declared and isinstance(weights, Mapping):
                # such as those of a service, which declares none
                self.declared[name] = tuple(dict.fromkeys([*self.declared[name], *weights]))
        self.weights = self._weights(given or {})  # by name

    def of(self, scorer: str, dimension: str) -> str:
        """Return the name of a scorer's dimension."""
        label = self.labels.get(scorer, scorer)
        if self.is_held_out:
            return f"held_out/{label}/{dimension}"
        is_shared = any(
            dimension in dimensions for name, dimensions in self.declared.items() if name != scorer
        )
        return f"{label}/{dimension}" if is_shared else dimension

    def renamed(self, scorer: str, scores: Scores) -> Scores:
        """Return the scores of a scorer by name.

        `OVERALL` is left out if there are several scorers.
        """
        is_alone = self.is_held_out or len(self.declared) < 2
        return {
            self.of(scorer, name): score
            for name, score in scores.items()
            if is_alone or name != OVERALL
        }

    def _weights(self, given: Mapping[str, float | Mapping[str, float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, value in given.items():
            by_name = {self._of_dimension(key, value): value}
            if isinstance(value, Mapping):
                by_name = {
                    self._of_scorer(key, dimension): weight for dimension, weight in value.items()
                }
            if OVERALL in by_name:
                raise ValueError(
                    f"reward_weights must not weight {OVERALL}, the sum of VQ, MQ and TA; weight "
                    "those"
                )
            twice = sorted(found.keys() & by_name.keys())
            if twice:
                raise ValueError(
                    "reward_weights must give each dimension one weight, got two for "
                    f"{', '.join(twice)}"
                )
            found |= by_name
        return found

    def _of_dimension(self, dimension: str, weight: object) -> str:
        scorers = [name for name, dimensions in self.declared.items() if dimension in dimensions]
        if len(scorers) > 1 and weight:
            example = ", ".join(f'"{name}": {{"{dimension}": 1}}' for name in scorers)
            raise ValueError(
                f"reward_weights must give the weight of {dimension} by scorer, because "
                f"{' and '.join(scorers)} both return it, got one weight; write for example "
                f"{{{example}}}"
            )
        return dimension

    def _of_scorer(self, scorer: str, dimension: str) -> str:
        if scorer not in self.declared and len(self.declared) > 1:
            raise ValueError(
                f"reward_weights must name the scorers {', '.join(self.declared)}, got {scorer}"
            )
        if scorer not in self.declared:
            return dimension
        return self.of(scorer, dimension)
