/* The tree of one step and what is known of its nodes: the state that search.c grows and predict.c fills. */

#ifndef HF_SPECDEC_SEARCH_H
#define HF_SPECDEC_SEARCH_H

#include "core.h"

enum { OWN_TEXT, YOUNG_TEXT, OLD_TEXT, NUM_TEXTS };
enum { OWN, POOLED, RECYCLED, COMMON = RECYCLED + MAX_KEY, DRAFT, SIBLINGS, NUM_SOURCES };
enum { MAX_TAIL = MAX_KEY + 1, MAX_MATCH = 16, WIDTH = NUM_SOURCES + 1, NUM_BINS = 20 };
#define MOST 0.93

/* A list that grows; its entries are reached by number, as it moves when it grows. */
#define LIST(type) \
    struct { \
        type *at; \
        int count, room; \
    }
#define NEW(list) (list_grow((void **)&(list)->at, (list)->count, &(list)->room, sizeof *(list)->at) < 0 ? -1 : (list)->count++)
int list_grow(void **at, int count, int *room, size_t size);

typedef struct { int text, place, size, follower; } Match;
typedef struct { int32_t token; double value; } Evidence;
typedef struct { int place, first, count; } Source;
typedef struct { int32_t token; double sum, noise, raw, probability; } Candidate; /* noise: minus the log of its draw's */
typedef struct { int first, count; } Range;

typedef struct { /* what may follow a node */
    int kind;
    Range sources, candidates;
    double weights[WIDTH]; /* the bias, then each source's */
    double others; /* score of all tokens that are no candidates */
} Prediction;

typedef struct {
    int32_t token;
    int parent, depth, first_child, next_sibling, place; /* place: among the nodes last found */
    int num_tail, has_matches, has_prediction, has_score;
    int32_t tail[MAX_TAIL]; /* last token first */
    double probability;
    Range matches; /* this text's, then the earlier ones' */
    int num_own;
    Range score; /* the draft model's evidence */
    Prediction prediction;
} Node;

typedef struct {
    PyObject_HEAD
    PyObject *texts[NUM_TEXTS], *recycled, *learned; /* arrays that Python owns, NULL where there are none */
    PyObject *noise; /* of the draws after the nodes of each depth, as far as it is known: a tuple of fp32 arrays */
    PyObject *common_of; /* (tokens, counts, total): the text's commonest tokens */
    int takes_trees, max_depth, has_common;
    int64_t end; /* of the text when the search began */
    LIST(Node) nodes;
    LIST(Match) matches;
    LIST(Evidence) evidence;
    LIST(Source) sources;
    LIST(Candidate) candidates;
    LIST(Evidence) common;
} Search;

typedef struct { /* the arrays, for the length of one call */
    Ngrams texts[NUM_TEXTS];
    Table recycled;
    Py_buffer views[6];
    double *weights, *expected, *accepted, *factors, *record; /* record: of this text, expected and accepted */
    int64_t *seen;
    int num_kinds;
} Arrays;

/* -1 with an exception where the arrays do not fit together. */
int arrays_acquire(Arrays *arrays, const Search *search);
void arrays_release(Arrays *arrays, const Search *search);

/* Numbers of the likeliest nodes, the root first; how many, -1 where memory runs out. */
int search_find(Search *search, const Arrays *arrays, int budget, double floor, int *found);
/* The node below `node` that holds `token`, -1 where there is none. */
int search_child_of(const Search *search, int node, int32_t token);

/* Turn the scores of candidates into probabilities, `others` being that of all other tokens. */
void softmax(double *scores, int count, double others);
/* The place of a probability in the calibration, whatever number it is. */
int bin_of(double probability);
double corrected(const Arrays *arrays, double probability);
/* What may follow `node`, found out at first use; NULL where memory runs out. */
const Prediction *predicted(Search *search, const Arrays *arrays, int node);
/* The candidate that holds `token`, NULL where there is none. */
const Candidate *candidate_of(const Search *search, const Prediction *prediction, int32_t token);
/* Learn every token that the text went on with, down the verified tree: `lists` are its tokens, its parents and the
 * tokens of the text. -1 where memory runs out. `work`: room for a node's children. */
int search_learn(Search *search, Arrays *arrays, int32_t *const lists[3], const Py_ssize_t counts[3], int32_t *work);

#endif
