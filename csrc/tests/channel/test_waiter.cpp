// How a rank waits before it sleeps.

#include <doctest/doctest.h>

#include "channel/waiter.h"

using namespace bls;

TEST_CASE("ranks with a CPU each spin for a while, others give theirs up at once") {
  CHECK(policy_for(4, 8).spin_for.count() > 0);
  CHECK(policy_for(8, 8).spin_for.count() > 0);
  CHECK(policy_for(9, 8).spin_for.count() == 0);
  CHECK(policy_for(2, 1.5).spin_for.count() == 0);  // as a quota has it
}

TEST_CASE("a spin looks at what it waits for, and ends") {
  int looks = 0;
  const auto after = [&](int wanted) {
    looks = 0;
    return [&, wanted] { return ++looks == wanted; };
  };
  WaitPolicy policy;
  CHECK(spin_until(policy, after(1)));
  CHECK(looks == 1);
  CHECK(spin_until(policy, after(WaitPolicy::kPolls)));
  policy.spin_for = std::chrono::hours(1);
  CHECK(spin_until(policy, after(100 * WaitPolicy::kPolls)));
  policy.spin_for = std::chrono::microseconds(50);
  CHECK_FALSE(spin_until(policy, after(-1)));
  CHECK(looks >= 2 * WaitPolicy::kPolls);
  CHECK(looks % WaitPolicy::kPolls == 0);
  policy.spin_for = {};
  CHECK_FALSE(spin_until(policy, after(-1)));
  CHECK(looks == WaitPolicy::kPolls);
}
