"""How many machines a load needs: workloads, step costs, simulation and the search over fleets."""
