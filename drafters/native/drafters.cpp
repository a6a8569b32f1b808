// Exports to Python: the address of each function, as module_function, and the size of each structure.
//
// `library.py` knows the types of a function from its declaration in Python.
#include "automaton.h"
#include "fusion.h"
#include "lookup.h"
#include "retrieval.h"
#include "search.h"
#include "splice.h"

#define FUNCTION(module, name) extern "C" const auto module##_##name = &outrider::module::name;
#define STRUCTURE(name) extern "C" const int64_t size_of_##name = sizeof(outrider::name);

STRUCTURE(Automaton)
STRUCTURE(BaseArrays)
STRUCTURE(Candidates)
STRUCTURE(Contexts)
STRUCTURE(Corpus)
STRUCTURE(Dice)
STRUCTURE(History)
STRUCTURE(LearnedRows)
STRUCTURE(Nodes)
STRUCTURE(Pages)
STRUCTURE(Pool)
STRUCTURE(Scratch)
STRUCTURE(Sources)
STRUCTURE(Trie)
STRUCTURE(Trigrams)

FUNCTION(automaton, append)
FUNCTION(automaton, clear)
FUNCTION(automaton, repeated_suffix)
FUNCTION(base_table, context_key)
FUNCTION(base_table, find)
FUNCTION(contexts, enter)
FUNCTION(dice, exponential)
FUNCTION(dice, position_key)
FUNCTION(dice, random_bits)
FUNCTION(dice, weigh_tree)
FUNCTION(fusion, commit_all)
FUNCTION(fusion, grow)
FUNCTION(history, append)
FUNCTION(history, extend_hashes)
FUNCTION(history, find_copy)
FUNCTION(history, follow_copy)
FUNCTION(history, followers)
FUNCTION(learned_table, absorb)
FUNCTION(learned_table, learn)
FUNCTION(learned_table, successors)
FUNCTION(lookup, grow)
FUNCTION(mixture, commit)
FUNCTION(mixture, predict)
FUNCTION(nodes, choose_likeliest)
FUNCTION(nodes, lay_out)
FUNCTION(nodes, reset)
FUNCTION(pages, word)
FUNCTION(retrieval, insert)
FUNCTION(retrieval, read)
FUNCTION(retrieval, weigh)
FUNCTION(search, best_first)
FUNCTION(splice, find_places)
FUNCTION(suffix, count_frequent)
FUNCTION(suffix, follow)
FUNCTION(suffix, frequent_row)
FUNCTION(suffix, narrow)
FUNCTION(suffix, position_at)
FUNCTION(trie, child)
FUNCTION(trie, restart)
