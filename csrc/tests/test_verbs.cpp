#include <doctest/doctest.h>

#include "random_exchange.h"
#include "verbs_ranks.h"

using namespace bls;
using namespace bls::testing;
