"""Learning rate and sequence length as functions of how much of the budget is spent, so the budget may change late."""

from .settings import Recipe


def scale_rate(recipe: Recipe, done: int) -> float:
    """Warm up, stay, then fall linearly to zero over the last `decay_share` of the budget."""
    rise = min(1.0, (done + recipe.batch_tokens) / recipe.warmup_tokens)
    left = (recipe.tokens - done) / (recipe.decay_share * recipe.tokens)
    return min(rise, max(0.0, min(1.0, left)))


def is_decaying(recipe: Recipe, done: int) -> bool:
    """The phase in which drafters also learn acceptance itself."""
    return done >= (1 - recipe.decay_share) * recipe.tokens


def is_quantising(recipe: Recipe, done: int) -> bool:
    """The phase that trains through NF4 rounding, because that is what is shipped."""
    return done >= (1 - recipe.quantise_share) * recipe.tokens


def choose_length(recipe: Recipe, done: int, step: int) -> int:
    """Short sequences first, the long ones in turn at the end."""
    if done < recipe.short_share * recipe.tokens:
        return recipe.short_sequence
    if done < (1 - recipe.long_share) * recipe.tokens:
        return recipe.sequence
    return recipe.long_sequences[step % len(recipe.long_sequences)]
