"""All parsers of untrusted input, by name."""

from benchmarks.fuzz import parsers_of_operator, parsers_of_runtime, parsers_of_trainer

PARSERS = {
    parser.name: parser
    for parser in (*parsers_of_operator.PARSERS, *parsers_of_runtime.PARSERS, *parsers_of_trainer.PARSERS)
}
