/* The search of one step: the same nodes, in the same order, as hf_specdec/methods/auto/python_search.py. */

#include "search.h"
#include <string.h>

typedef struct { double probability; int arrival, parent; int32_t token; } Waiting;
typedef LIST(Waiting) Queue;
typedef LIST(double) Least;

int list_grow(void **at, int count, int *room, size_t size) {
    if (count < *room) return 0;
    int wanted = *room ? 2 * *room : 64;
    void *grown = PyMem_Realloc(*at, (size_t)wanted * size);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *at = grown;
    *room = wanted;
    return 0;
}

static int is_before(const Waiting *one, const Waiting *other) {
    if (one->probability != other->probability) return one->probability > other->probability;
    return one->arrival < other->arrival;
}

static void queue_push(Queue *queue, Waiting one) {
    int place = queue->count - 1; /* the caller has made room for it */
    for (; place > 0 && is_before(&one, &queue->at[(place - 1) / 2]); place = (place - 1) / 2)
        queue->at[place] = queue->at[(place - 1) / 2];
    queue->at[place] = one;
}

static Waiting queue_pop(Queue *queue) {
    Waiting first = queue->at[0], last = queue->at[--queue->count];
    int place = 0, below;
    while ((below = 2 * place + 1) < queue->count) {
        if (below + 1 < queue->count && is_before(&queue->at[below + 1], &queue->at[below])) below++;
        if (is_before(&last, &queue->at[below])) break;
        queue->at[place] = queue->at[below];
        place = below;
    }
    queue->at[place] = last;
    return first;
}

/* Put a probability among the `most` largest; 0 where so many are as large. -1 where memory runs out. */
static int keep_least(Least *best, int most, double probability) {
    int place;
    if (best->count < most) {
        if ((place = NEW(best)) < 0) return -1;
        for (; place > 0 && best->at[(place - 1) / 2] > probability; place = (place - 1) / 2)
            best->at[place] = best->at[(place - 1) / 2];
        best->at[place] = probability;
        return 1;
    }
    if (probability <= best->at[0]) return 0;
    int below;
    for (place = 0; (below = 2 * place + 1) < best->count; place = below) {
        if (below + 1 < best->count && best->at[below + 1] < best->at[below]) below++;
        if (best->at[below] >= probability) break;
        best->at[place] = best->at[below];
    }
    best->at[place] = probability;
    return 1;
}

static int offer(Queue *queue, Least *best, int budget, int *arrivals, int node, int32_t token, double probability) {
    int is_kept = keep_least(best, budget, probability);
    if (is_kept <= 0) return is_kept;
    if (NEW(queue) < 0) return -1;
    queue_push(queue, (Waiting){probability, ++*arrivals, node, token});
    return 0;
}

/* Offer what may follow `node` and is as likely as `floor` together with all before it; in a chain, the best of it. */
static int offer_following(Search *search, const Arrays *arrays, int node, double floor, int budget, Queue *queue,
                           Least *best, int *arrivals) {
    double reached = search->nodes.at[node].probability, most = -1.0;
    if (reached * MOST < floor || search->nodes.at[node].depth >= search->max_depth) return 0;
    const Prediction *prediction = predicted(search, arrays, node);
    if (prediction == NULL) return -1;
    int32_t token = 0;
    const Candidate *one = search->candidates.at + prediction->candidates.first;
    for (int left = prediction->candidates.count; left > 0; left--, one++) {
        double probability = reached * one->probability;
        if (probability < floor) continue;
        if (search->takes_trees) {
            if (offer(queue, best, budget, arrivals, node, one->token, probability) < 0) return -1;
        } else if (probability > most) {
            most = probability;
            token = one->token;
        }
    }
    return most < 0.0 ? 0 : offer(queue, best, budget, arrivals, node, token, most);
}

int search_child_of(const Search *search, int node, int32_t token) {
    int child = search->nodes.at[node].first_child;
    while (child >= 0 && search->nodes.at[child].token != token) child = search->nodes.at[child].next_sibling;
    return child;
}

static int child_made(Search *search, int parent, int32_t token) {
    int child = search_child_of(search, parent, token);
    if (child >= 0 || (child = NEW(&search->nodes)) < 0) return child;
    Node *node = &search->nodes.at[child], *above = &search->nodes.at[parent];
    memset(node, 0, sizeof *node);
    node->token = token;
    node->parent = parent;
    node->depth = above->depth + 1;
    node->first_child = -1;
    node->next_sibling = above->first_child;
    above->first_child = child;
    node->num_tail = above->num_tail < MAX_TAIL ? above->num_tail + 1 : MAX_TAIL;
    node->tail[0] = token;
    for (int size = 1; size < node->num_tail; size++) node->tail[size] = above->tail[size - 1];
    return child;
}

int search_find(Search *search, const Arrays *arrays, int budget, double floor, int *found) {
    Queue queue = {NULL, 0, 0};
    Least best = {NULL, 0, 0};
    int count = 1, arrivals = 0, failed = 0;
    found[0] = 0;
    while (count <= budget) {
        int node = found[count - 1];
        failed = offer_following(search, arrays, node, floor, budget, &queue, &best, &arrivals) < 0;
        if (failed) break;
        if (best.count == budget && best.at[0] > floor) floor = best.at[0];
        if (queue.count == 0) break;
        Waiting next = queue_pop(&queue);
        int child = child_made(search, next.parent, next.token);
        failed = child < 0;
        if (failed) break;
        search->nodes.at[child].probability = next.probability;
        search->nodes.at[child].place = count;
        found[count++] = child;
    }
    PyMem_Free(queue.at);
    PyMem_Free(best.at);
    return failed ? -1 : count;
}
