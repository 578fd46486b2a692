/* What may follow a node: the same sums, in the same order, as hf_specdec/methods/auto/python_search.py. */

#include "search.h"
#include <math.h>
#include <string.h>

enum { NUM_PLACES = 16, FEW = 4, COUNTED_MATCH = 8, NUM_MATCH_KINDS = 6, NUM_COMMON = 16 };
#define FLOOR 7.0
#define SMOOTHING_COUNT 4.0
#define PRIOR_COUNT 4.0
#define MOST_TRUST 1.3
#define OTHERS_NOISE 0.5
#define OTHERS_DRAFTED 2.0
#define LEAST_NOISE 1e-30
#define NEVER_DRAWN -1e4

/* The token that follows a match: behind the text's end stand the drafted ones above `node`; below 0 a boundary. */
static int follower_of(const Search *search, const Arrays *arrays, int node, int text, int64_t place) {
    if (text != OWN_TEXT || place < search->end)
        return place < arrays->texts[text].num_tokens ? arrays->texts[text].tokens[place] : -1;
    while (search->nodes.at[node].depth > place - search->end + 1) node = search->nodes.at[node].parent;
    return search->nodes.at[node].token;
}

static int add_match(Search *search, const Arrays *arrays, int node, int text, int64_t place, int size) {
    int follower = follower_of(search, arrays, node, text, place);
    if (follower < 0) return 0;
    int match = NEW(&search->matches);
    if (match < 0) return -1;
    search->matches.at[match] = (Match){text, (int)place, size, follower};
    return 0;
}

static int match_length(const Ngrams *index, int64_t place, const int32_t *context, int64_t length) {
    int same = 0; /* up to the second token that does not agree */
    for (int back = 1; back <= place && back <= length && back <= same + 2; back++)
        same += index->tokens[place - back] == context[length - back];
    return same;
}

static int is_known(const Search *search, int first, int text, int place) {
    for (int match = first; match < search->matches.count; match++)
        if (search->matches.at[match].text == text && search->matches.at[match].place == place) return 1;
    return 0;
}

/* Add the newest places after every n-gram that ends the text, in the text itself or in the earlier ones. */
static int match_text(Search *search, const Arrays *arrays, int is_own) {
    const Ngrams *own = &arrays->texts[OWN_TEXT];
    int64_t length = search->end < MAX_MATCH ? search->end : MAX_MATCH;
    const int32_t *context = own->tokens + search->end - length;
    int first_text = is_own ? OWN_TEXT : YOUNG_TEXT, last_text = is_own ? OWN_TEXT : OLD_TEXT;
    int first = search->matches.count;
    int32_t found[NUM_PLACES];
    for (int64_t size = own->orders < length ? own->orders : length; size > 0; size--) {
        int left = NUM_PLACES;
        for (int text = first_text; text <= last_text; text++) {
            if (search->texts[text] == NULL) continue;
            const Ngrams *index = &arrays->texts[text];
            int64_t end = is_own ? search->end : index->num_tokens;
            int count = ngrams_places(index, context + length - size, size, end, left, found);
            left -= count;
            for (int place = 0; place < count; place++) {
                if (is_known(search, first, text, found[place])) continue;
                int same = match_length(index, found[place], context, length);
                if (add_match(search, arrays, 0, text, found[place], same) < 0) return -1;
            }
        }
    }
    return 0;
}

/* Move the parent's matches that the node's token follows on by one. */
static int move_matches(Search *search, const Arrays *arrays, int node, int is_own) {
    Node above = search->nodes.at[search->nodes.at[node].parent];
    int32_t token = search->nodes.at[node].token, newest[NUM_PLACES];
    int first = is_own ? 0 : above.num_own, last = is_own ? above.num_own : above.matches.count;
    int kept = 0, moved = search->matches.count;
    for (int number = above.matches.first + first; number < above.matches.first + last; number++) {
        Match match = search->matches.at[number];
        if (match.follower != token) continue;
        int size = match.size < MAX_MATCH ? match.size + 1 : MAX_MATCH;
        kept++;
        if (add_match(search, arrays, node, match.text, match.place + 1, size) < 0) return -1;
    }
    if (!is_own || kept >= FEW) return 0;
    int count = ngrams_places(&arrays->texts[OWN_TEXT], &token, 1, search->end, NUM_PLACES, newest);
    for (int place = 0; place < count; place++) {
        if (is_known(search, moved, OWN_TEXT, newest[place])) continue;
        if (add_match(search, arrays, node, OWN_TEXT, newest[place], 1) < 0) return -1;
    }
    return 0;
}

static int ensure_matches(Search *search, const Arrays *arrays, int node) {
    Node *here = &search->nodes.at[node];
    if (here->has_matches) return 0;
    if (here->parent >= 0 && ensure_matches(search, arrays, here->parent) < 0) return -1;
    int first = search->matches.count, is_root = here->parent < 0;
    for (int is_own = 1; is_own >= 0; is_own--) {
        int failed = is_root ? match_text(search, arrays, is_own) : move_matches(search, arrays, node, is_own);
        if (failed < 0) return -1;
        if (is_own) here->num_own = search->matches.count - first;
    }
    here->matches = (Range){first, search->matches.count - first};
    here->has_matches = 1;
    return 0;
}

static int add_evidence(Search *search, int32_t token, double value) {
    int number = NEW(&search->evidence);
    if (number < 0) return -1;
    search->evidence.at[number] = (Evidence){token, value};
    return 0;
}

/* A source whose evidence are the entries from `first` on. */
static int add_source(Search *search, int place, int first, int count) {
    int number = NEW(&search->sources);
    if (number < 0) return -1;
    search->sources.at[number] = (Source){place, first, count};
    return 0;
}

/* Votes of these matches as evidence: m * m for one of m tokens, the longest at most as one of COUNTED_MATCH. */
static int count_votes(Search *search, Range matches, int place, int *longest) {
    int first = search->evidence.count;
    double total = 0.0;
    *longest = 0;
    for (int number = matches.first; number < matches.first + matches.count; number++) {
        Match match = search->matches.at[number];
        double vote = (double)(match.size * match.size);
        int known = first;
        while (known < search->evidence.count && search->evidence.at[known].token != match.follower) known++;
        if (known == search->evidence.count && add_evidence(search, match.follower, 0.0) < 0) return -1;
        search->evidence.at[known].value += vote;
        total += vote;
        if (match.size > *longest) *longest = match.size;
    }
    total += SMOOTHING_COUNT * pow(fmax(1.0, (double)*longest / COUNTED_MATCH), 2.0);
    for (int number = first; number < search->evidence.count; number++) {
        double *value = &search->evidence.at[number].value, odds = FLOOR + log(*value / (total - *value));
        *value = odds > 0.0 ? odds : 0.0;
    }
    return *longest ? add_source(search, place, first, search->evidence.count - first) : 0;
}

/* What an entry holds but for the token `left_out`, -1 for none. */
static int add_entry(Search *search, const Table *table, int64_t entry, int place, int32_t left_out) {
    int first = search->evidence.count;
    for (int64_t kept = entry * NUM_KEPT; kept < (entry + 1) * NUM_KEPT && table->tokens[kept] >= 0; kept++)
        if (table->tokens[kept] != left_out &&
            add_evidence(search, table->tokens[kept], (double)table->evidence[kept]) < 0) return -1;
    return add_source(search, place, first, search->evidence.count - first);
}

/* The keys of the last one, two and three of `count` tokens, last one first; how many there are. */
static int keys_of(const int32_t *tail, int count, int64_t keys[MAX_KEY]) {
    int size = 0;
    for (int64_t key = 0; size < MAX_KEY && size < count; size++) keys[size] = key |= key_part((int64_t)tail[size] + 1, size);
    return size;
}

/* What the table holds under the longest known key of the tokens before a node's last one. */
static int add_siblings(Search *search, const Arrays *arrays, const Node *here) {
    int64_t keys[MAX_KEY], entry = -1;
    int size = search->recycled == NULL ? 0 : keys_of(here->tail + 1, here->num_tail - 1, keys);
    for (; size > 0 && entry < 0; size--) entry = table_find(&arrays->recycled, keys[size - 1]);
    return entry < 0 ? 0 : add_entry(search, &arrays->recycled, entry, SIBLINGS, here->tail[0]);
}

/* The text's commonest tokens and the evidence for each, looked up where first wanted; -1 with an exception. */
static int ensure_common(Search *search) {
    PyObject *tokens, *counts;
    Py_buffer views[2];
    double total;
    if (search->has_common) return 0;
    if (!PyArg_ParseTuple(search->common_of, "OOd", &tokens, &counts, &total)) return -1;
    if (PyObject_GetBuffer(tokens, &views[0], PyBUF_SIMPLE) < 0) return -1;
    if (PyObject_GetBuffer(counts, &views[1], PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&views[0]);
        return -1;
    }
    Py_ssize_t size = views[0].len / 4 < views[1].len / 8 ? views[0].len / 4 : views[1].len / 8;
    search->has_common = 1;
    for (Py_ssize_t place = 0; search->has_common && place < size && place < NUM_COMMON; place++) {
        double share = (double)((const int64_t *)views[1].buf)[place] / total, odds = FLOOR + log(share / (1.0 - share));
        int number = NEW(&search->common);
        if (number < 0) search->has_common = 0;
        else search->common.at[number] = (Evidence){((const int32_t *)views[0].buf)[place], odds > 0.0 ? odds : 0.0};
    }
    PyBuffer_Release(&views[0]);
    PyBuffer_Release(&views[1]);
    return search->has_common - 1;
}

/* Ask every source; the kind of the context, -1 where memory runs out. */
static int ask_sources(Search *search, const Arrays *arrays, int node) {
    if (ensure_matches(search, arrays, node) < 0) return -1;
    Node here = search->nodes.at[node];
    Range own = {here.matches.first, here.num_own};
    Range pooled = {own.first + own.count, here.matches.count - own.count};
    int64_t keys[MAX_KEY];
    int longest, ignored, level = 0, num_keys = keys_of(here.tail, here.num_tail, keys);
    if (count_votes(search, own, OWN, &longest) < 0 || count_votes(search, pooled, POOLED, &ignored) < 0) return -1;
    for (int size = 1; search->recycled != NULL && size <= num_keys; size++) {
        int64_t entry = table_find(&arrays->recycled, keys[size - 1]);
        if (entry < 0) continue;
        level = size;
        if (add_entry(search, &arrays->recycled, entry, RECYCLED + MAX_KEY - size, -1) < 0) return -1;
    }
    if (level == 0) {
        int first = search->evidence.count;
        if (ensure_common(search) < 0) return -1;
        for (int token = 0; token < search->common.count; token++)
            if (add_evidence(search, search->common.at[token].token, search->common.at[token].value) < 0) return -1;
        if (add_source(search, COMMON, first, search->common.count) < 0) return -1;
    }
    if (here.has_score && add_source(search, DRAFT, here.score.first, here.score.count) < 0) return -1;
    if (add_siblings(search, arrays, &here) < 0) return -1;
    static const int match_kinds[] = {0, 1, 2, 3, 4, 4, 5};
    return (here.has_score * NUM_MATCH_KINDS + match_kinds[longest < 6 ? longest : 6]) * (MAX_KEY + 1) + level;
}

int bin_of(double probability) {
    int bin = probability > 0.0 ? (int)(fmin(probability, 1.0) * NUM_BINS) : 0;
    return bin < NUM_BINS - 1 ? bin : NUM_BINS - 1;
}

double corrected(const Arrays *arrays, double probability) {
    double factor = arrays->factors[bin_of(probability)];
    return probability * factor < MOST ? probability * factor : MOST;
}

/* Set what the noise of the draw after `here` adds to the candidates' scores, 0 where it is not known, and to that of all
 * other tokens; -1 with an exception. */
static int add_noise(const Search *search, const Node *here, Candidate *candidates, int count, double *others) {
    int depth = here->depth;
    *others = 0.0;
    for (int one = 0; one < count; one++) candidates[one].noise = 0.0;
    if (depth >= PyTuple_Size(search->noise)) return 0;
    Py_buffer noise;
    if (PyObject_GetBuffer(PyTuple_GetItem(search->noise, depth), &noise, PyBUF_SIMPLE) < 0) return -1;
    *others = -log(here->has_score ? OTHERS_DRAFTED : OTHERS_NOISE);
    for (int one = 0; one < count; one++) {
        int32_t token = candidates[one].token;
        double least = token < noise.len / 4 ? (double)((const float *)noise.buf)[token] : -1.0;
        candidates[one].noise = least < 0.0 ? NEVER_DRAWN : -log(least > LEAST_NOISE ? least : LEAST_NOISE);
    }
    PyBuffer_Release(&noise);
    return 0;
}

void softmax(double *scores, int count, double others) {
    double largest = others, total;
    for (int one = 0; one < count; one++)
        if (scores[one] > largest) largest = scores[one];
    total = exp(others - largest);
    for (int one = 0; one < count; one++) {
        scores[one] = exp(scores[one] - largest);
        total += scores[one];
    }
    for (int one = 0; one < count; one++) scores[one] /= total;
}

/* What may follow `node`; -1 where memory runs out. */
static int predict(Search *search, const Arrays *arrays, int node, Prediction *prediction) {
    int first = search->candidates.count;
    prediction->sources.first = search->sources.count;
    prediction->kind = ask_sources(search, arrays, node);
    if (prediction->kind < 0 || prediction->kind >= arrays->num_kinds) return -1;
    prediction->sources.count = search->sources.count - prediction->sources.first;
    const double *weights = prediction->weights;
    memcpy(prediction->weights, arrays->weights + prediction->kind * WIDTH, sizeof prediction->weights);
    for (int number = 0; number < prediction->sources.count; number++) {
        Source source = search->sources.at[prediction->sources.first + number];
        double weight = weights[source.place + 1];
        for (int one = source.first; one < source.first + source.count; one++) {
            Evidence said = search->evidence.at[one];
            int known = first;
            while (known < search->candidates.count && search->candidates.at[known].token != said.token) known++;
            if (known == search->candidates.count) {
                if (NEW(&search->candidates) < 0) return -1;
                search->candidates.at[known] = (Candidate){said.token, weights[0], 0.0, 0.0, 0.0};
            }
            search->candidates.at[known].sum += weight * said.value;
        }
    }
    prediction->candidates = (Range){first, search->candidates.count - first};
    double trust = (arrays->record[1] + PRIOR_COUNT) / (arrays->record[0] + PRIOR_COUNT), total = 0.0;
    if (trust > MOST_TRUST) trust = MOST_TRUST;
    Candidate *begin = search->candidates.at + first, *end = search->candidates.at + search->candidates.count;
    int count = (int)(end - begin);
    if (add_noise(search, &search->nodes.at[node], begin, count, &prediction->others) < 0) return -1;
    double *shares = PyMem_Malloc((size_t)(count ? count : 1) * sizeof(double));
    if (shares == NULL) return -1;
    for (int one = 0; one < count; one++) shares[one] = begin[one].sum + begin[one].noise;
    softmax(shares, count, prediction->others);
    for (int one = 0; one < count; one++) begin[one].raw = shares[one];
    PyMem_Free(shares);
    for (Candidate *one = begin; one < end; one++) {
        one->probability = fmin(corrected(arrays, one->raw) * trust, MOST);
        total += one->probability;
    }
    for (int one = first; total > 1.0 && one < search->candidates.count; one++) search->candidates.at[one].probability /= total;
    return 0;
}

const Prediction *predicted(Search *search, const Arrays *arrays, int node) {
    if (!search->nodes.at[node].has_prediction) {
        Prediction made;
        if (predict(search, arrays, node, &made) < 0) return NULL;
        search->nodes.at[node].prediction = made;
        search->nodes.at[node].has_prediction = 1;
    }
    return &search->nodes.at[node].prediction;
}

const Candidate *candidate_of(const Search *search, const Prediction *prediction, int32_t token) {
    const Candidate *one = search->candidates.at + prediction->candidates.first;
    for (int left = prediction->candidates.count; left > 0; left--, one++)
        if (one->token == token) return one;
    return NULL;
}
